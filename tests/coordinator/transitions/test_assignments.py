"""Which of the work that there is a worker gets first."""

from __future__ import annotations

from pathlib import Path

from coordinator.core.work import EvaluationWork, Round
from tests.coordinator.sync_job import SYNC, rounds
from tests.coordinator.whole_coordinator import start


def test_a_worker_ends_what_it_holds_of_a_round_before_it_evaluates(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **SYNC, eval_records=8)
    rounds(coordinator, worker, 2)
    assert not coordinator.job_run.training.orders.evaluations.idle
    # It has both micro-batches of the first round of epoch 2.
    first = worker.round()
    assert first.ahead is not None
    second = worker.commit(first)
    assert isinstance(second, Round)
    assert second.attempt == first.ahead
    assert isinstance(worker.commit(second), EvaluationWork)
