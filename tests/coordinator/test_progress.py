"""Counters, rates and curves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from coordinator.curves import POINTS_PER_FLUSH, Curves
from coordinator.gauges import Gauges
from coordinator.progress import Meter, Progress, mean_loss
from coordinator.tensorboard import EventWriter
from coordinator.work import Report
from psrpc.batch import BatchId


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


def test_the_loss_of_a_round_is_weighted_by_examples() -> None:
    reports = [report(0, 4, 1.0), report(0, 2, 4.0), report(0, 4, math.nan, skipped=True)]
    assert mean_loss(reports) == 2.0
    assert math.isnan(mean_loss([]))


class Recorder:
    """Notes the scalars that would be written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.points: list[tuple[str, float, int]] = []
        monkeypatch.setattr(EventWriter, "scalar", lambda _self, *point: self.points.append(point))

    def of(self, tag: str) -> list[tuple[float, int]]:
        return [(value, step) for t, value, step in self.points if t == tag]


def test_slow_steps_get_a_point_each_and_fast_ones_are_averaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    curves = Curves(tmp_path)
    curves.step(1, 0.5, 1)
    curves.step(2, math.nan, 3)
    curves.step(3, 0.7, 2)
    curves.flush(Gauges(now=0.0, steps_per_s=10.0, examples_per_s=100.0))
    assert recorder.of("train/loss") == [(0.5, 1), (0.7, 3)]
    assert recorder.of("train/staleness") == [(2.0, 3)]
    assert recorder.of("train/steps_per_s") == [(10.0, 3)]
    assert recorder.of("train/examples_per_s") == [(100.0, 3)]
    recorder.points.clear()
    curves.flush(Gauges(now=0.0, steps_per_s=10.0, examples_per_s=100.0))
    assert recorder.points == []
    for step in range(1000):
        curves.step(step, float(step), 0)
    curves.flush(Gauges(now=0.0))
    points = recorder.of("train/loss")
    assert len(points) == POINTS_PER_FLUSH
    assert points[0] == (9.5, 19)
    assert points[-1][1] == 999
    curves.epoch({"accuracy": 0.9}, 7)
    assert recorder.of("epoch/accuracy") == [(0.9, 7)]


def test_a_disk_that_refuses_stops_the_curves_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    curves = Curves(tmp_path / "file")
    for step in range(3):
        curves.step(step, 1.0, 0)
        curves.flush(Gauges(now=0.0))
    curves.close()
