"""Evaluations: each task once, in a fixed order of summing, while training goes on."""

from __future__ import annotations

import pytest

from coordinator.core.work import EvaluationWork, MergeWork, MetricVariable
from coordinator.schedule.evaluation import Evaluations
from psrpc.core.errors import InvalidArgument


def states(value: float) -> tuple[MetricVariable, ...]:
    return (MetricVariable((), (value,)), MetricVariable((2,), (value, 1.0)))


def make(records: int = 5000, batch_size: int = 50) -> Evaluations:
    evaluations = Evaluations(records, batch_size)
    evaluations.add("epoch-0", "snap", 7)
    evaluations.snapshot_taken("snap")
    return evaluations


def task(evaluations: Evaluations, worker: str) -> EvaluationWork:
    work = evaluations.lease(worker)
    assert isinstance(work, EvaluationWork)
    return work


@pytest.mark.parametrize(
    ("records", "batch_size", "ranges"),
    [
        (5000, 50, [(0, 2000), (2000, 4000), (4000, 5000)]),
        (5000, 300, [(0, 2100), (2100, 4200), (4200, 5000)]),
        (10, 4096, [(0, 10)]),
    ],
)
def test_tasks_are_whole_batches_of_about_2000_records(
    records: int, batch_size: int, ranges: list[tuple[int, int]]
) -> None:
    evaluations = make(records, batch_size)
    works = [task(evaluations, f"w{n}") for n in range(len(ranges))]
    assert [(w.start, w.stop) for w in works] == ranges
    assert evaluations.lease("another") is None


def test_states_are_summed_in_task_order_and_merged_once() -> None:
    evaluations = make()
    works = [task(evaluations, w) for w in "abc"]
    for work, worker, value in reversed(list(zip(works, "abc", (1.0, 1e16, -1e16), strict=True))):
        assert evaluations.report(
            worker, "epoch-0", work.task, work.stop - work.start, states(value)
        )
    merge = evaluations.lease("b")
    assert merge == MergeWork(
        "epoch-0", (MetricVariable((), (0.0,)), MetricVariable((2,), (0.0, 3.0)))
    )
    assert evaluations.lease("a") is None
    assert evaluations.lease("b") == merge
    evaluations.release("b")
    assert evaluations.lease("a") == merge
    assert evaluations.merged("b", "epoch-0", {"loss": 7.0}) is None, "another does it now"
    result = evaluations.merged("a", "epoch-0", {"loss": 0.5})
    assert result is not None
    assert (result.global_step, result.snapshot, dict(result.values)) == (7, "snap", {"loss": 0.5})
    assert evaluations.merged("a", "epoch-0", {"loss": 9.9}) is None
    assert evaluations.idle


def test_a_result_counts_from_the_worker_that_holds_the_task_alone() -> None:
    evaluations = make(2000)
    first = task(evaluations, "slow")
    assert evaluations.release("slow") == 1
    again = task(evaluations, "quick")
    assert again == first
    assert not evaluations.report("slow", "epoch-0", 0, 2000, states(2.0))
    assert not evaluations.report("stranger", "epoch-0", 0, 2000, states(3.0))
    assert evaluations.report("quick", "epoch-0", 0, 2000, states(1.0))
    assert not evaluations.report("quick", "epoch-0", 0, 2000, states(4.0))
    assert evaluations.waiting_for() == "a worker to merge evaluation epoch-0"
    merge = evaluations.lease("quick")
    assert isinstance(merge, MergeWork)
    assert merge.states == states(1.0)
    assert evaluations.waiting_for() == "quick to merge evaluation epoch-0"


def test_a_worker_that_asks_again_gets_its_task_again() -> None:
    evaluations = make()
    assert task(evaluations, "w") == task(evaluations, "w")


def test_evaluations_wait_for_their_snapshot_and_for_each_other() -> None:
    evaluations = Evaluations(10, 10)
    evaluations.add("epoch-0", "one", 1)
    evaluations.add("epoch-1", "two", 2)
    evaluations.snapshot_taken("two")
    assert evaluations.lease("w") is None
    assert evaluations.waiting_for() == "snapshot one for evaluation epoch-0"
    evaluations.snapshot_taken("one")
    assert evaluations.waiting_for() == "a worker to do evaluation epoch-0 (0 of 1 task done)"
    assert task(evaluations, "w").evaluation == "epoch-0"
    assert evaluations.waiting_for() == "w to do evaluation epoch-0 (0 of 1 task done)"
    evaluations.report("w", "epoch-0", 0, 10, states(1.0))
    assert isinstance(evaluations.lease("w"), MergeWork)
    evaluations.merged("w", "epoch-0", {})
    assert task(evaluations, "w").evaluation == "epoch-1"


def test_a_failed_snapshot_drops_its_evaluation_and_late_results_are_ignored() -> None:
    evaluations = make()
    work = task(evaluations, "w")
    assert evaluations.drop("snap") == ["epoch-0"]
    assert not evaluations.report("w", "epoch-0", work.task, 2000, states(1.0))
    assert evaluations.idle


@pytest.mark.parametrize(
    ("name", "number", "records", "what"),
    [
        ("epoch-9", 0, 2000, "there is no evaluation 'epoch-9'"),
        ("epoch-0", 3, 2000, "has tasks 0..2, not 3"),
        ("epoch-0", 1, 1999, r"evaluated 1999 records .* expected 2000 \(records 2000..3999\)"),
    ],
)
def test_results_that_do_not_fit_are_refused(
    name: str, number: int, records: int, what: str
) -> None:
    with pytest.raises(InvalidArgument, match=what):
        make().report("w", name, number, records, states(1.0))


def test_states_of_another_form_are_refused_and_so_is_an_early_merge() -> None:
    evaluations = make()
    assert task(evaluations, "w").task == 0
    assert evaluations.report("w", "epoch-0", 0, 2000, states(1.0))
    with pytest.raises(InvalidArgument, match="shapes"):
        evaluations.report("w", "epoch-0", 1, 2000, states(1.0)[:1])
    with pytest.raises(InvalidArgument, match="before its tasks were done"):
        evaluations.merged("w", "epoch-0", {})
