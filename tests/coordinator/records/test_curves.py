"""Content and times of the files for TensorBoard."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from coordinator.core.figures import WorkerTimes
from coordinator.core.run import Followed
from coordinator.records.curves import (
    GAUGES_EVERY_S,
    HISTOGRAM_EVERY_S,
    MAX_CHARTED,
    MOST_STEPS,
    POINTS_PER_FLUSH,
    Curves,
    Gauges,
)
from coordinator.records.tensorboard import EventWriter
from psrpc.core.policy import ASYNC, Policy


class Recorder:
    """Notes what would be written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.points: list[tuple[str, Any, int]] = []
        for name in ("scalar", "histogram", "text"):
            monkeypatch.setattr(EventWriter, name, lambda _self, *point: self.points.append(point))

    def of(self, tag: str) -> list[tuple[Any, int]]:
        return [(value, step) for t, value, step in self.points if t == tag]

    @property
    def tags(self) -> set[str]:
        return {tag for tag, _, _ in self.points}


def flushed(curves: Curves, step: int, **gauges: Any) -> None:
    curves.step(step, 1.0, 0)
    curves.flush(Gauges(**gauges))


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
    [warning] = curves.warnings
    assert f"no more TensorBoard curves in {tmp_path / 'file'}: " in warning
    assert (tmp_path / "file").read_text() == "in the way"


def test_the_time_of_workers_is_shown_by_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, curves = Recorder(monkeypatch), Curves(tmp_path)
    one, two = WorkerTimes(compute=8.0, barrier=2.0), WorkerTimes(compute=1.0, network=1.0)
    flushed(curves, 1, now=0.0, times={"a": one, "b": two, "c": WorkerTimes()})
    assert recorder.of("time_share/compute") == [(pytest.approx(0.65), 1)]
    assert recorder.of("time_share/barrier") == [(pytest.approx(0.1), 1)]
    assert recorder.of("time_share/data") == [(0.0, 1)]
    # No worker has reported since, then one has; and one is another process by now.
    flushed(curves, 2, now=1.0, times={"a": one, "b": two})
    assert len(recorder.of("time_share/compute")) == 1
    one = WorkerTimes(compute=8.0, barrier=4.0)
    flushed(curves, 3, now=2.0, times={"a": one, "b": WorkerTimes(compute=0.5)})
    assert recorder.of("time_share/compute")[1:] == [(0.5, 3)]
    assert recorder.of("time_share/barrier")[1:] == [(0.5, 3)]


def test_gauges_are_written_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, curves = Recorder(monkeypatch), Curves(tmp_path)
    counts = {"too_stale": 3, "late": 0}
    speeds = {f"worker-{n}": float(n) for n in range(MAX_CHARTED + 5)}
    flushed(curves, 1, now=10.0, version_skew=4, counts=counts, speeds=speeds)
    assert recorder.of("shards/version_skew") == [(4, 1)]
    assert recorder.of("counts/too_stale") == [(3, 1)]
    assert "counts/late" not in recorder.tags
    assert recorder.of("examples_per_s/worker-2") == [(2.0, 1)]
    flushed(curves, 2, now=10.0 + GAUGES_EVERY_S / 2, version_skew=5)
    assert len(recorder.of("shards/version_skew")) == 1
    flushed(curves, 3, now=10.0 + GAUGES_EVERY_S, speeds={"worker-2": 0.5, "new": 1.0})
    assert recorder.of("examples_per_s/worker-2")[1:] == [(0.5, 3)]
    assert sum(tag.startswith("examples_per_s/") for tag in recorder.tags) == MAX_CHARTED


def test_a_histogram_is_of_the_pushes_since_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, curves = Recorder(monkeypatch), Curves(tmp_path)
    tag = "train/staleness_counts"
    flushed(curves, 1, now=0.0)
    flushed(curves, 2, now=1.0, staleness_counts=(5, 1))
    flushed(curves, 3, now=2.0, staleness_counts=(7, 1, 1))
    assert recorder.of(tag) == [([5, 1], 2)]
    flushed(curves, 4, now=1.0 + HISTOGRAM_EVERY_S, staleness_counts=(9, 1, 2))
    assert recorder.of(tag)[1:] == [([4, 0, 2], 4)]
    # A shard was restarted.
    now = 1.0 + 2 * HISTOGRAM_EVERY_S
    flushed(curves, 5, now=now, staleness_counts=(3,))
    assert len(recorder.of(tag)) == 2
    flushed(curves, 6, now=now, staleness_counts=(4,))
    assert recorder.of(tag)[2:] == [([1], 6)]


def test_each_policy_is_written_down_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, curves = Recorder(monkeypatch), Curves(tmp_path)
    first = Followed(1, ASYNC)
    second = Followed(2, Policy(mode="ssp", staleness=4), step=120, batches=120)
    curves.flush(Gauges(now=0.0, policies=(first,)))
    assert recorder.points == []
    flushed(curves, 1, now=0.0, policies=(first,))
    flushed(curves, 121, now=0.0, policies=(first, second))
    flushed(curves, 122, now=0.0, policies=(first, second))
    assert recorder.of("policy") == [
        ("policy 1 from global step 0: `async`", 0),
        ("policy 2 from global step 120: `ssp staleness=4`", 120),
    ]


def files_nbytes(logdir: Path) -> int:
    return sum(file.stat().st_size for file in logdir.iterdir())


def test_files_of_a_run_grow_by_the_logarithm_of_its_length(tmp_path: Path) -> None:
    level, now, raw = 16 << 10, 0.0, 0
    sizes = []
    for start in range(4):
        # A coordinator that was started again goes on with what is there.
        curves = Curves(tmp_path, level)
        curves._writer._files = start  # as another process would name it
        for _ in range(5000):
            now += 0.5
            for _ in range(3):
                curves.step(raw, 1.0, 0)
                raw += 1
            curves.epoch({"train_loss": 0.5}, raw)
            curves.flush(Gauges(now=now, speeds={f"worker-{n}": 1.0 for n in range(4)}))
        curves.close()
        assert curves.warnings == []
        sizes.append(files_nbytes(tmp_path))
        rate = (POINTS_PER_FLUSH + 9) * 2 * 60  # as much as they may come to
        assert sizes[-1] <= level * (1 + math.log2(1 + rate * now / level)) + 2048, start
    assert sizes[0] > 4 * level, "most of what is written is written at first"
    assert sizes[3] - sizes[1] < 1.5 * level, "twice the time is one level more"


def test_held_back_points_are_means_and_come_at_the_end_at_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, curves = Recorder(monkeypatch), Curves(tmp_path, 1000)
    curves._writer.nbytes = 4000  # pauses of 8 s
    flushed(curves, 1, now=0.0)
    curves.epoch({"accuracy": 0.5}, 1)
    curves.flush(Gauges(now=0.5))
    recorder.points.clear()
    for step in range(2, 10_002):
        curves.step(step, float(step), 4)
        curves.epoch({"accuracy": step / 10_001}, step)
        curves.flush(Gauges(now=step / 10_002 * 7.9))
    assert recorder.points == []
    assert len(curves._steps) < MOST_STEPS
    curves.flush(Gauges(now=8.0))
    losses = recorder.of("train/loss")
    assert POINTS_PER_FLUSH / 2 < len(losses) <= POINTS_PER_FLUSH
    assert losses[-1][1] == 10_001
    assert recorder.of("train/staleness") == [(4.0, 10_001)]
    curves.epoch({"accuracy": 0.75}, 10_002)
    curves.step(10_002, 7.0, 0)
    curves.close()
    assert recorder.of("epoch/accuracy") == [(0.75, 10_002)]
    assert recorder.of("train/loss")[-1] == (7.0, 10_002)
