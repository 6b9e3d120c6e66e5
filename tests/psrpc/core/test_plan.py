"""The plan: every element once, cuts even and aligned, whole means whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrpc.core.errors import InvalidJob
from psrpc.core.placement import make_plan
from psrpc.core.plan import ALIGNMENT_BYTES, Placement, Plan, VariableSpec, aligned_empty
from psrpc.core.tables import TableSpec

variables = st.lists(
    st.builds(
        lambda shape, dtype, role: (tuple(shape), dtype, role),
        st.lists(st.integers(1, 9), max_size=3),
        st.sampled_from(["float32", "float64"]),
        st.sampled_from(["trainable", "state"]),
    )
    | st.lists(st.integers(1, 9), max_size=3).map(lambda shape: (tuple(shape), "int64", "state")),
    max_size=8,
).map(
    lambda kinds: [
        VariableSpec("first", (7,), "float32", "trainable"),
        *(VariableSpec(f"v{i}", *kind) for i, kind in enumerate(kinds)),
    ]
)


@given(variables, st.integers(1, 5), st.sampled_from(["cut", "whole"]))
def test_every_element_lives_in_one_place(
    specs: list[VariableSpec], shards: int, placement: Placement
) -> None:
    plan = make_plan(specs, shards, placement)
    seen = {v.name: np.zeros(v.size, int) for v in specs}
    for arena in plan.arenas:
        for shard in range(shards):
            filled = 0
            for piece in plan.shard_slices(arena, shard):
                assert piece.offset == filled, "slices fill the shard's part without gaps"
                filled += piece.stop - piece.start
                seen[piece.variable.name][piece.start : piece.stop] += 1
            assert filled == arena.shard_length(shard)
    assert all((count == 1).all() for count in seen.values())
    assert sum(plan.shard_nbytes(k) for k in range(shards)) == sum(
        v.size * np.dtype(v.dtype).itemsize for v in specs
    )


@given(variables, st.integers(1, 5), st.sampled_from(["cut", "whole"]))
def test_json_round_trip_keeps_the_hash(
    specs: list[VariableSpec], shards: int, placement: Placement
) -> None:
    plan = make_plan(specs, shards, placement)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash


def test_cuts_are_even_and_aligned() -> None:
    plan = make_plan([VariableSpec("w", (1000, 333), "float32", "trainable")], 3, "cut")
    (arena,) = plan.arenas
    assert all(cut * 4 % ALIGNMENT_BYTES == 0 for cut in arena.cuts[:-1])
    lengths = [arena.shard_length(k) for k in range(3)]
    assert max(lengths) - min(lengths) <= 2 * ALIGNMENT_BYTES // 4


@pytest.mark.parametrize(("dtype", "unit"), [("float32", 16), ("float64", 8)])
def test_cut_variables_that_fill_units_of_64_bytes_are_aligned(dtype: str, unit: int) -> None:
    sizes = [10, unit, 3 * unit, unit + 1, 1, 7 * unit]
    specs = [VariableSpec(f"v{i}", (n,), dtype, "trainable") for i, n in enumerate(sizes)]
    (arena,) = make_plan(specs, 2, "cut").arenas
    assert arena.order == (1, 2, 5, 0, 3, 4)
    assert [start % unit for start in arena.starts[:4]] == [0] * 4


def test_whole_keeps_variables_whole_and_balances() -> None:
    specs = [VariableSpec(f"v{i}", (100 - i,), "float32", "trainable") for i in range(10)]
    plan = make_plan(specs, 2, "whole")
    for shard in range(2):
        for piece in plan.shard_slices(plan.arenas[0], shard):
            assert (piece.start, piece.stop) == (0, piece.variable.size)
    assert abs(plan.shard_nbytes(0) - plan.shard_nbytes(1)) <= 4 * 100


INTEGERS_TOO = {"w": "float32", "n": "int64"}


def test_another_layout_has_another_hash() -> None:
    specs = [VariableSpec("w", (64,), "float32", "trainable")]
    hashes = {make_plan(specs, shards, "cut").hash for shards in (1, 2, 3)}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "no trainable variables"),
        ([VariableSpec("m", (2,), "float32", "state")], "no trainable variables"),
        ([VariableSpec("w", (2,), "int32", "trainable")], "'w' has dtype int32"),
        (
            [VariableSpec(name, (2,), dtype, "trainable") for name, dtype in INTEGERS_TOO.items()],
            "'n' is trainable and int64",
        ),
        ([VariableSpec("w", (2,), "float32", "trainable")] * 2, "2 variables are named 'w'"),
    ],
)
def test_variables_that_cannot_be_laid_out_are_refused(
    specs: list[VariableSpec], message: str
) -> None:
    with pytest.raises(InvalidJob, match=message):
        make_plan(specs, 1, "cut")


def test_only_a_table_that_keeps_evicted_rows_says_so() -> None:
    # Plans of before have no such key, and keep their hash.
    zero = {"class_name": "constant", "config": {"value": 0.0}}
    sgd = {"class_name": "SGD", "config": {"learning_rate": 0.1}}
    plain = TableSpec("t", 2, None, zero, sgd, max_rows=9, eviction="age")
    plans = [make_plan([], 1, "cut", [replace(plain, keep_evicted=k)]) for k in (False, True)]
    assert [b"keep_evicted" in plan.to_json() for plan in plans] == [False, True]
    assert [Plan.from_json(plan.to_json()) for plan in plans] == plans
    with pytest.raises(InvalidJob, match="'t' keeps evicted rows, but evicts none"):
        make_plan([], 1, "cut", [replace(plain, eviction=None, keep_evicted=True)])


@given(st.integers(1, 100))
def test_aligned_empty_is_aligned(length: int) -> None:
    array = aligned_empty(length, "float32")
    assert array.shape == (length,)
    assert array.ctypes.data % ALIGNMENT_BYTES == 0
