"""Removal of checkpoints that were kept only until they were evaluated."""

from __future__ import annotations

from pathlib import Path

from coordinator.core.work import EvaluationWork, MergeWork, MetricVariable, Work
from tests.coordinator.whole_coordinator import Coordinator, Worker, start

FIRST, LAST = "step-00000002", "step-00000004"


def two_rounds(coordinator: Coordinator, worker: Worker) -> None:
    for _ in range(4):
        worker.commit(worker.round())
        coordinator.settle()


def finish(coordinator: Coordinator, worker: Worker, task: Work, loss: float) -> None:
    """Does the evaluation of which ``worker`` holds the only task."""
    assert isinstance(task, EvaluationWork)
    states = (MetricVariable((2,), (loss * 4, 4.0)),)
    engine, caller = coordinator.engine, worker.caller
    engine.report_evaluated(caller, task.evaluation, task.task, 4, states)
    merge = worker.lease()
    assert isinstance(merge, MergeWork)
    engine.report_merged(caller, merge.evaluation, {"loss": loss})
    coordinator.settle()


def kept(coordinator: Coordinator) -> list[str]:
    return sorted(p.name for p in (coordinator.job_run.run.run_dir / "checkpoints").iterdir())


def test_one_that_turns_out_not_to_be_the_best_goes_with_its_evaluation(tmp_path: Path) -> None:
    coordinator, worker = start(
        tmp_path,
        mode="sync",
        replicas=2,
        epochs=2,
        train_records=16,
        total_updates=4,
        eval_records=4,
        keep_best={"metric": "loss", "lower": True},
        keep_checkpoints=1,
    )
    evaluator = Worker(coordinator, 2)
    two_rounds(coordinator, worker)
    task = evaluator.lease()
    two_rounds(coordinator, worker)
    assert kept(coordinator) == [FIRST, LAST], "neither is evaluated yet"
    finish(coordinator, evaluator, task, loss=0.5)
    assert kept(coordinator) == [FIRST, LAST], "the best, and the newest"
    finish(coordinator, evaluator, evaluator.lease(), loss=0.25)
    assert coordinator.job_run.phase == "done"
    assert kept(coordinator) == [LAST]
