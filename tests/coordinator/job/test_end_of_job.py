"""Files on the disk when a job is over, and the order in which they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.checkpoints.disk import ThreadedDisk
from coordinator.job.job_run import JobRun
from coordinator.records.store import Store
from coordinator.records.stored_values import ENDED
from psrpc.ops.clock import ManualClock
from tests.coordinator.builders import make_run


def test_the_result_is_there_before_the_end_is_stored(tmp_path: Path) -> None:
    """A coordinator that is killed in between goes on and comes to the same end; one that is
    killed later is not started again, since the store says that there is nothing to do."""
    run = make_run(tmp_path)
    stored: list[tuple[str, Any]] = []
    with Store(tmp_path / "ledger.sqlite") as store:
        job_run = JobRun(
            run,
            store,
            ManualClock(),
            ThreadedDisk(run, failed=pytest.fail),
            at_end=lambda: stored.append((job_run.phase, store.get(ENDED))),
        )
        job_run.fail("why")
        job_run.fail("again")
        assert stored == [("failed", None)]
        assert store.get(ENDED) == {"phase": "failed", "reason": "why"}
        job_run.close()
