"""The writing of snapshots, and what becomes of it when another generation begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import Queue
from threading import Event

import numpy as np
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pserver.core.requests import Snapshot, Values
from pserver.snapshots.writer import MAX_PENDING, SnapshotFiles, SnapshotWriter
from pserver.updates.engine import Slots
from psrpc.core.commands import SnapshotOrder
from psrpc.core.errors import StaleGeneration
from psrpc.core.shard_reports import MAX_EPOCHS, AppliedEpoch, SnapshotReport
from psrpc.files.storage import Disk, Written
from psrpc.ops.tracing import tracing
from psrpc.wire.bounds import check_bounds
from psrpc.wire.shard_reports import to_snapshot_report
from tests.pserver.shards import identity_of, plan_of

PLAN = plan_of(size=8, state=False)
ARENA = PLAN.arenas[0].name
WAIT_S = 30.0


class SlowDisk(Disk):
    """A disk that writes when it is let."""

    def __init__(self) -> None:
        self.writing: Queue[Path] = Queue()
        self.go_on = Event()

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> Written:
        self.writing.put(path)
        assert self.go_on.wait(WAIT_S)
        return super().write(path, parts)


@pytest.fixture
def disk() -> SlowDisk:
    return SlowDisk()


@pytest.fixture
def reports() -> Queue[SnapshotReport]:
    return Queue()


@pytest.fixture
def writer(
    tmp_path: Path, disk: SlowDisk, reports: Queue[SnapshotReport]
) -> Iterator[SnapshotWriter]:
    writer = SnapshotWriter(
        SnapshotFiles(identity_of(), PLAN, "run-1", tmp_path, disk), reports.put
    )
    writer.begun(1)
    writer.start()
    yield writer
    disk.go_on.set()
    writer.stop(WAIT_S)


def order(tmp_path: Path, directory: str, name: str = "step-1") -> SnapshotOrder:
    (tmp_path / directory).mkdir(exist_ok=True)
    return SnapshotOrder(name, write=True, keep=False, directory=directory, global_step=1)


def snapshot(generation: int, version: int = 0) -> Snapshot:
    values = Values(version, generation, {ARENA: np.zeros(8, np.float32)})
    return Snapshot(values, Slots(scalars={"iterations": np.array(version)}), ())


def test_waiting_snapshots_are_given_up_and_those_being_written_not_reported(
    tmp_path: Path,
    disk: SlowDisk,
    reports: Queue[SnapshotReport],
    writer: SnapshotWriter,
) -> None:
    writer.taken(order(tmp_path, "first"), snapshot(1))
    assert disk.writing.get(timeout=WAIT_S).parent.name == "first"
    writer.taken(order(tmp_path, "second", "step-2"), snapshot(1, 2))
    writer.failed(order(tmp_path, "second", "step-3"), 3, "no memory")
    writer.begun(2)
    for number in range(MAX_PENDING - 1):
        writer.taken(order(tmp_path, f"new-{number}"), snapshot(2, 7))
    disk.go_on.set()
    report = reports.get(timeout=WAIT_S)
    assert (report.name, report.generation, report.file.version) == ("step-1", 2, 7)
    assert report.error == ""
    assert disk.writing.get(timeout=WAIT_S).parent.name == "new-0"
    assert disk.writing.empty()
    assert [path.name for path in (tmp_path / "first").iterdir()] == [report.file.file], "finished"
    assert list((tmp_path / "second").iterdir()) == []
    writer.repeated(order(tmp_path, "new-0"))
    assert reports.get(timeout=WAIT_S) == report


def test_a_report_that_is_refused_does_not_stop_the_next(tmp_path: Path, disk: SlowDisk) -> None:
    reports: Queue[SnapshotReport] = Queue()

    def report(request: SnapshotReport) -> None:
        reports.put(request)
        raise StaleGeneration("there is a newer one")

    disk.go_on.set()
    writer = SnapshotWriter(SnapshotFiles(identity_of(), PLAN, "run-1", tmp_path, disk), report)
    writer.start()
    writer.taken(order(tmp_path, "a"), snapshot(1))
    writer.taken(order(tmp_path, "b", "step-2"), snapshot(1))
    assert [reports.get(timeout=WAIT_S).name for _ in range(2)] == ["step-1", "step-2"]
    writer.stop(WAIT_S)


def test_so_many_wait_and_no_more(
    tmp_path: Path,
    disk: SlowDisk,
    reports: Queue[SnapshotReport],
    writer: SnapshotWriter,
) -> None:
    for number in range(MAX_PENDING + 1):
        writer.taken(order(tmp_path, f"d{number}", f"step-{number}"), snapshot(1))
    disk.go_on.set()
    errors = [reports.get(timeout=WAIT_S).error for _ in range(MAX_PENDING + 1)]
    assert errors == [""] * MAX_PENDING + [f"{MAX_PENDING} snapshots wait to be written already"]


def test_a_checkpoint_is_a_span(tmp_path: Path, disk: SlowDisk) -> None:
    exporter = InMemorySpanExporter()
    disk.go_on.set()
    files = SnapshotFiles(identity_of(), PLAN, "run-1", tmp_path, disk)
    with tracing("", "test", exporter):
        files.write(order(tmp_path, "step-1"), snapshot(1))
    (span,) = exporter.get_finished_spans()
    assert span.name == "checkpoint"
    assert dict(span.attributes or {}) == {"pserver.shard": 0, "pserver.checkpoint": "step-1"}


def test_a_job_of_thousands_of_epochs_reports_the_newest(tmp_path: Path) -> None:
    files = SnapshotFiles(identity_of(), PLAN, "run-1", tmp_path, Disk())
    applied = [
        AppliedEpoch(epoch=epoch, applied=[[0, 8]], skipped=[], totals=[0.5, 8.0])
        for epoch in range(3000)
    ]
    report = files.report(SnapshotOrder("step-1", 1), 1, 3000, applied)
    assert [one.epoch for one in report.epochs] == list(range(3000 - MAX_EPOCHS, 3000))
    message = to_snapshot_report(report)
    check_bounds(message, message.ByteSize())
