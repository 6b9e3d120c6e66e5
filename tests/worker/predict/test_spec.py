"""Batches are divided so that each has one part, in order."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from worker.predict.spec import PartsSpec, read_parts_spec, share, write_parts_spec


@given(st.integers(1, 10**9), st.integers(1, 9))
def test_each_batch_is_in_one_part_in_order(batches: int, count: int) -> None:
    shares = [share(batches, index, count) for index in range(count)]
    assert shares[0].start == 0
    assert shares[-1].stop == batches
    assert all(one.stop == other.start for one, other in pairwise(shares))
    sizes = list(map(len, shares))
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1 or count > batches


def test_settings_come_back_as_written(tmp_path: Path) -> None:
    spec = PartsSpec(what="evaluate", data={"steps": 3}, gpu="none", gpu_memory_fraction=0.5)
    write_parts_spec(tmp_path, spec)
    assert read_parts_spec(tmp_path) == spec
