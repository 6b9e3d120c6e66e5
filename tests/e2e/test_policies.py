"""Whole jobs on real clusters under each consistency policy: every record counts once an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.cluster import JOBS, up

pytestmark = pytest.mark.slow

RECORDS, EPOCHS = 1230, 2
"""Of the job; batches of 20 leave a short one at the end of each epoch."""


@dataclass(frozen=True)
class Case:
    """``steps`` and ``batches`` are those of both epochs."""

    mode: str | None
    settings: tuple[str, ...]
    steps: int
    batches: int = 2 * 62


CASES = {
    "ssp, then backup workers": Case(
        "ssp", ("staleness=1", "then=sync", "then_after=1", "aggregate=2"), steps=62 + 31
    ),
    "async that minds staleness, then speculation": Case(
        "async",
        (
            *("max_staleness=2", "staleness_lr=inverse", "delay_compensation=adaptive"),
            *("then=sync", "then_after=1", "speculate=true", "round_deadline_s=30"),
        ),
        steps=62 + 21,
    ),
    # Batches of 40 records: 31 in each epoch, in rounds of three.
    "local steps": Case("sync", ("local_steps=2",), steps=2 * 11, batches=2 * 31),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_every_record_counts_once_in_each_epoch(tmp_path: Path, case: Case) -> None:
    args = ["--workers", "2", "--shards", "2"]
    if case.mode is not None:
        args += ["--mode", case.mode]
    for setting in case.settings:
        args += ["--set", setting]
    summary = up(JOBS / "dense.py", tmp_path / "run", *args).summary
    assert summary["examples"] == EPOCHS * RECORDS
    assert summary["batches"] == case.batches
    assert summary["global_step"] == case.steps
    assert summary["skipped"] == 0
