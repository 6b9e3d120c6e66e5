"""Counters and rates."""

from __future__ import annotations

import math

import pytest

from coordinator.core.work import Report
from coordinator.membership.progress import Meter, Progress, mean_loss
from coordinator.membership.stragglers import LEAST_S
from psrpc.core.batch import BatchId
from psrpc.core.shard_reports import MAX_WORKERS


def report(
    epoch: int, count: int, loss: float, staleness: int = 0, skipped: bool = False
) -> Report:
    return Report(BatchId(epoch, 0, count), 1, loss, staleness, skipped)


def test_a_rate_is_of_the_last_ten_seconds() -> None:
    meter = Meter()
    assert meter.rate(0.0) == 0.0
    for tenth in range(101):
        meter.add(1, tenth / 10)
    assert meter.rate(10.0) == pytest.approx(10, rel=0.05)
    assert meter.rate(15.0) == pytest.approx(5, rel=0.15)
    assert meter.rate(30.0) == 0.0


def test_skipped_batches_count_as_batches_only() -> None:
    progress = Progress(skipped=2)
    progress.leased("a", 1.0)
    progress.leased("b", 2.0)
    progress.done("a", report(0, 4, 1.0, staleness=2), 3.0)
    progress.done("a", report(0, 2, 4.0, staleness=1), 4.0)
    progress.done("b", report(0, 4, math.nan, skipped=True), 5.0)
    assert (progress.batches, progress.examples, progress.skipped) == (3, 6, 3)
    assert progress.mean_staleness == 1.5
    assert progress.train_s == 4.0
    assert progress.workers["a"].batches == 2
    assert progress.workers["a"].mean_examples_per_s == 2.0
    assert progress.contributors == 2
    assert progress.epoch_loss(0) == 2.0
    assert math.isnan(progress.epoch_loss(0))


def test_discarded_batches_count_in_the_pace_only() -> None:
    progress = Progress()
    progress.leased("a", 0.0)
    for batch in range(1, 5):
        progress.in_vain("a", report(0, 4, 1.0))
        progress.beat("a", 2.0 * batch, LEAST_S * batch)
    progress.beat("stranger", 1.0, 1.0)
    assert progress.workers["a"].pace.s_per_example == pytest.approx(0.5)
    assert (progress.batches, progress.contributors, progress.train_s) == (0, 0, 0.0)
    assert progress.workers["a"].mean_examples_per_s == 0.0
    assert list(progress.workers) == ["a"]


def test_workers_that_left_are_forgotten_in_the_order_of_leaving() -> None:
    progress = Progress()
    for n in range(MAX_WORKERS):
        progress.done(f"worker-{n}", report(0, 4, 1.0), float(n))
    progress.left("worker-5")
    progress.left("worker-3")
    progress.left("a stranger")
    assert len(progress.workers) == MAX_WORKERS
    progress.done("new", report(0, 4, 1.0), 1000.0)
    progress.left("worker-4")
    assert len(progress.workers) == MAX_WORKERS
    assert "worker-5" not in progress.workers
    assert {"worker-3", "worker-4"} <= set(progress.workers)
    # Who is there is never forgotten.
    progress.done("newer", report(0, 4, 1.0), 1000.0)
    assert len(progress.workers) == MAX_WORKERS + 1
    assert progress.contributors == MAX_WORKERS + 2


def test_the_loss_of_a_round_is_weighted_by_examples() -> None:
    reports = [report(0, 4, 1.0), report(0, 2, 4.0), report(0, 4, math.nan, skipped=True)]
    assert mean_loss(reports) == 2.0
    assert math.isnan(mean_loss([]))
