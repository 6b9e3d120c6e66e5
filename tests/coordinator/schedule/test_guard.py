"""The guard: stops what has gone wrong in a finite way, and lets noise pass."""

from __future__ import annotations

import math

import pytest

from coordinator.schedule.guard import (
    PATIENCE_STEPS,
    SKIPPED_IN_A_ROW,
    WARNED_STEPS,
    WINDOW_STEPS,
    Guard,
)
from psrpc.core.batch import BatchId
from psrpc.core.policy import ASYNC, Policy

BATCH = BatchId(0, 40, 4)
SYNC = Policy(mode="sync", replicas=3)


def test_ten_skipped_in_a_row_stop_the_job_and_nine_do_not() -> None:
    guard = Guard(ASYNC)
    for _ in range(2):
        for _ in range(SKIPPED_IN_A_ROW - 1):
            assert guard.batch(BATCH, skipped=True) is None
        assert guard.batch(BATCH, skipped=False) is None
    verdicts = [guard.batch(BATCH, skipped=True) for _ in range(SKIPPED_IN_A_ROW)]
    assert verdicts[:-1] == [None] * (SKIPPED_IN_A_ROW - 1)
    assert "epoch 1 positions 40..43" in (verdicts[-1] or "")


def stale(policy: Policy) -> Guard:
    """Of a job where the parameters of a gradient were not the newest."""
    guard = Guard(policy)
    guard.batch(BATCH, skipped=False, staleness=1)
    return guard


def losses(guard: Guard, *spans: tuple[float, int]) -> list[str | None]:
    return [guard.step(loss) for loss, steps in spans for _ in range(steps)]


def test_a_loss_that_stays_above_three_times_the_first_stops_the_job() -> None:
    guard = stale(ASYNC)
    verdicts = losses(guard, (1.0, WINDOW_STEPS), (100.0, PATIENCE_STEPS))
    assert verdicts[:-1] == [None] * (len(verdicts) - 1)
    assert verdicts[-1] is not None
    assert "diverged" in verdicts[-1]
    assert "optimizer.learning_rate" in verdicts[-1]
    assert "--mode sync" in verdicts[-1]


def test_an_attended_job_hears_of_no_stop_and_no_option() -> None:
    guard = Guard(ASYNC, attended=True)
    guard.batch(BATCH, skipped=False, staleness=1)
    verdict = losses(guard, (1.0, WINDOW_STEPS), (100.0, PATIENCE_STEPS))[-1]
    for said in (verdict, *guard.warnings):
        assert said is not None
        assert said.endswith("; lower optimizer.learning_rate")
        assert "stopped" not in said


def test_the_advice_to_a_sync_job_is_not_to_use_sync() -> None:
    verdict = losses(stale(SYNC), (1.0, WINDOW_STEPS), (100.0, PATIENCE_STEPS))[-1]
    assert verdict is not None
    assert "--mode sync" not in verdict
    assert "staleness" not in verdict


def test_a_person_is_warned_at_half_of_the_patience() -> None:
    guard = stale(ASYNC)
    losses(guard, (1.0, WINDOW_STEPS), (10.0, WINDOW_STEPS))
    # The mean passes three times the first when 5 of its 20 losses are high.
    guard.warnings = []
    losses(guard, (10.0, WARNED_STEPS - WINDOW_STEPS + 4 - 1))
    assert guard.warnings == []
    assert losses(guard, (10.0, 1)) == [None]
    [warning] = guard.warnings
    assert warning == (
        "training may be diverging: the loss is 10 times its first value (10, first 1), and was "
        "above 3 times for 100 steps; the run is stopped after 200 such steps; lower the learning "
        "rate (--set optimizer.learning_rate=...), or divide it by 1 + staleness (coordinator set "
        "staleness_lr=inverse), or train in rounds of N micro-batches (coordinator set mode=sync "
        "replicas=N): staleness acts like more momentum"
    )
    assert "divide it" in (losses(guard, (10.0, PATIENCE_STEPS))[-1] or "")
    assert len(guard.warnings) == 1


def test_advice_leaves_out_settings_already_in_force() -> None:
    guard = stale(Policy(staleness_lr="inverse"))
    verdict = losses(guard, (1.0, WINDOW_STEPS), (100.0, PATIENCE_STEPS))[-1]
    assert "staleness_lr" not in guard.warnings[0] + (verdict or "")
    assert "coordinator set mode=sync" in guard.warnings[0]
    assert "--mode sync" in (verdict or "")


def test_another_policy_gets_the_whole_patience() -> None:
    guard = Guard(ASYNC)
    losses(guard, (1.0, WINDOW_STEPS), (100.0, PATIENCE_STEPS - 1))
    guard.follow(SYNC)
    assert losses(guard, (100.0, PATIENCE_STEPS - 1))[-1] is None
    guard.follow(SYNC)
    assert losses(guard, (100.0, 1))[-1] is not None


@pytest.mark.parametrize(
    "spans",
    [
        [(1.0, WINDOW_STEPS), (2.9, 1000)],
        [(1.0, WINDOW_STEPS), (100.0, 150), (1.0, 40), (100.0, 150)],
        [(0.0, WINDOW_STEPS), (5.0, 1000)],
        [(-1.0, WINDOW_STEPS), (5.0, 1000)],
        [(math.nan, 1000)],
    ],
    ids=["below", "recovers", "first is zero", "first is negative", "nan"],
)
def test_losses_that_are_no_divergence(spans: list[tuple[float, int]]) -> None:
    assert losses(Guard(ASYNC), *spans) == [None] * sum(n for _, n in spans)


def test_an_infinite_loss_counts_and_nan_is_left_out() -> None:
    assert losses(Guard(ASYNC), (1.0, 20), (math.inf, PATIENCE_STEPS))[-1] is not None
    guard = Guard(ASYNC)
    losses(guard, (1.0, 5), (math.nan, 100), (3.0, 5))
    assert guard.loss == 2.0
    assert guard.first_loss is None


def test_an_infinite_first_loss_is_no_reference() -> None:
    spans = [(math.inf, 1), (1.0, 2 * WINDOW_STEPS), (100.0, PATIENCE_STEPS + WINDOW_STEPS)]
    assert losses(Guard(ASYNC), *spans)[-1] is not None


def test_a_resumed_job_keeps_the_first_loss() -> None:
    guard = Guard(ASYNC, first_loss=1.0)
    assert losses(guard, (100.0, PATIENCE_STEPS + WINDOW_STEPS))[-1] is not None


def test_a_loss_that_explodes_is_warned_of_at_once_and_once() -> None:
    guard = stale(ASYNC)
    losses(guard, (1.0, WINDOW_STEPS), (1e9, 5))
    [warning] = guard.warnings
    assert "training may be diverging" in warning
    assert "staleness_lr=inverse" in warning


def test_nan_from_the_first_batch_on_is_not_put_down_to_the_learning_rate() -> None:
    guard = Guard(ASYNC)
    reason = [guard.batch(BATCH, skipped=True) for _ in range(10)][-1]
    assert reason is not None
    assert f"{BATCH}, and no batch before them had another; look for NaN in the data" in reason
    assert reason.index("NaN in the data") < reason.index("learning rate")
    # It was finite once, in an earlier start.
    again = Guard(ASYNC, first_loss=1.0)
    reason = str([again.batch(BATCH, skipped=True) for _ in range(10)][-1])
    assert reason.index("learning rate") < reason.index("NaN in the data")


def test_the_advice_after_nan_names_staleness_where_there_was_any() -> None:
    reasons = []
    for staleness in (0, 2):
        guard = Guard(ASYNC)
        guard.batch(BATCH, skipped=False)
        reasons.append([guard.batch(BATCH, skipped=True, staleness=staleness) for _ in range(10)])
    assert reasons[0][-1] == (
        f"PS603: 10 batches in a row had a NaN or infinite gradient, the last one {BATCH}; lower "
        "the learning rate (--set optimizer.learning_rate=...); or look for NaN in the data or a "
        "logarithm of zero in the loss"
    )
    assert "staleness acts like more momentum" in str(reasons[1][-1])
