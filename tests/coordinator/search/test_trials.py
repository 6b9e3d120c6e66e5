"""What a study does next, and what it reads of its trials."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from coordinator.search.trials import (
    AwaitTrials,
    BeginTrial,
    EndStudy,
    GoOnWith,
    NextStep,
    StudyCounts,
    StudyLimits,
    StudyMetric,
    TrialValue,
    check_metric,
    next_step,
    read_history,
    read_metric,
)
from psrpc.core.errors import InvalidArgument

LIMITS = StudyLimits(trials=4, parallel=2, max_failures=1)


@pytest.mark.parametrize(
    ("counts", "kind"),
    [
        (StudyCounts(0, 0, (), 0, 1), BeginTrial),
        # What was left under way comes before what is new, and counts as begun.
        (StudyCounts(4, 0, (2, 3), 0, 1), GoOnWith),
        (StudyCounts(4, 0, (3,), 1, 1), GoOnWith),
        (StudyCounts(3, 0, (), 1, 1), BeginTrial),
        (StudyCounts(3, 0, (), 2, 1), AwaitTrials),
        (StudyCounts(4, 0, (3,), 2, 1), AwaitTrials),
        (StudyCounts(4, 1, (), 1, 1), AwaitTrials),
        (StudyCounts(4, 1, (), 0, 1), EndStudy),
        # A study that is repeated with fewer trials begins none.
        (StudyCounts(6, 0, (), 0, 1), EndStudy),
        (StudyCounts(3, 2, (2,), 1, 1), EndStudy),
    ],
)
def test_the_next_step(counts: StudyCounts, kind: type[NextStep]) -> None:
    step = next_step(LIMITS, counts)
    assert isinstance(step, kind)
    if isinstance(step, GoOnWith):
        assert step.number == counts.left[0]
    if isinstance(step, EndStudy):
        assert step.failed == (counts.failed > LIMITS.max_failures)


def test_failures_and_time_end_a_study_with_a_reason() -> None:
    failed = next_step(LIMITS, StudyCounts(3, 2, (), 1, 1))
    assert failed == EndStudy(
        "2 trials have failed; --max-failures is 1, and a higher number goes on with the study",
        failed=True,
    )
    nothing = next_step(LIMITS, StudyCounts(4, 1, (), 0, 0))
    assert nothing == EndStudy("4 trials made, and none is complete; study.csv says why", True)
    late = next_step(LIMITS, StudyCounts(3, 0, (), 1, 1), out_of_time=True)
    assert late == EndStudy(
        "the time of --timeout is over; the same command goes on with the study"
    )


def trained(limits: StudyLimits, left: int) -> int:
    """Plays a study whose trials end one by one; returns how many were made."""
    counts = StudyCounts(left, 0, tuple(range(left)), 0, 1)
    while True:
        step = next_step(limits, counts)
        assert counts.running <= limits.parallel
        if isinstance(step, GoOnWith):
            counts = replace(counts, left=counts.left[1:], running=counts.running + 1)
        elif isinstance(step, BeginTrial):
            counts = replace(counts, begun=counts.begun + 1, running=counts.running + 1)
        elif isinstance(step, AwaitTrials):
            assert counts.running, "it would wait without end"
            counts = replace(counts, running=counts.running - 1)
        else:
            assert not counts.running
            return counts.begun


@pytest.mark.parametrize("parallel", [1, 2, 5])
@pytest.mark.parametrize("left", [0, 1, 3])
def test_a_study_makes_exactly_its_trials(parallel: int, left: int) -> None:
    assert trained(StudyLimits(4, parallel, 0), left) == 4


def test_a_metric_has_a_direction() -> None:
    assert read_metric("max:accuracy") == StudyMetric("max", "accuracy")
    assert str(read_metric("min:loss")) == "min:loss"
    assert StudyMetric("min", "loss").best([2.0, 1.0, 3.0]) == 1.0
    assert StudyMetric("max", "auc").best([2.0, 1.0, 3.0]) == 3.0
    for text, advice in (("accuracy", "max:accuracy"), ("up:auc", "max:auc"), ("mae", "min:mae")):
        with pytest.raises(InvalidArgument) as refused:
            read_metric(text)
        assert advice in str(refused.value)


def test_a_metric_that_the_job_does_not_report_is_refused() -> None:
    accuracy = StudyMetric("max", "accuracy")
    check_metric(accuracy, ["loss", "accuracy"], evaluated=True)
    for metric, evaluated, words in (
        (StudyMetric("max", "acuracy"), True, "did you mean 'accuracy'?"),
        (StudyMetric("max", "f1"), True, "it reports loss, accuracy"),
        (accuracy, False, "the job evaluates nothing; give it eval data"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            check_metric(metric, ["loss", "accuracy"], evaluated=evaluated)
        assert words in str(refused.value)


def test_the_history_of_a_run_has_the_values() -> None:
    text = (
        "epoch,step,loss,accuracy,val_loss,val_accuracy,eval_step,learning_rate\n"
        "1,10,0.5,0.8,0.4,0.85,10,0.1\n"
        "2,20,0.5,0.8,,,,0.1\n"
        "3,30,0.5,0.8,nan,0.1,30,0.1\n"
    )
    first, last = read_history(text, "accuracy")
    assert first == TrialValue(1, 0.85)
    assert last.epoch == 3
    assert math.isnan(last.value), "a network of NaNs has an accuracy, too"
    assert read_history(text, "auc") == []
    assert read_history("", "accuracy") == []
