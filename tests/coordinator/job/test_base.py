"""Which checkpoint the rows of the next one may continue, and what a shard reports of them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.checkpoints.cadence import Cadence
from coordinator.checkpoints.checkpoints import Checkpoints
from coordinator.checkpoints.disk import commit_checkpoint
from coordinator.checkpoints.orders import Orders
from coordinator.checkpoints.snapshots import Failed, Taken, temporary_directory
from coordinator.core.run import RestoredCheckpoint, Run
from psrpc.checkpoint.manifest import read_manifest
from psrpc.core.commands import Command, SnapshotOrder
from psrpc.core.errors import InvalidArgument
from psrpc.core.placement import make_plan
from psrpc.core.shard_reports import RowsFileEntry, ShardFile
from psrpc.ops.clock import ManualClock
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import from_order, to_order
from psrpc.wire.shard_reports import from_snapshot_report
from tests.coordinator.builders import QueuedDisk, make_run
from tests.psrpc.rows import TABLES


def run_of(run_dir: Path, tables: bool = True, shards: int = 1) -> Run:
    run = make_run(run_dir, shards, generation=1, checkpoint_every=10)
    variables = run.description.variables
    plan = make_plan(variables, shards, "cut", TABLES if tables else ())
    return replace(run, plan=plan)


class Ordering:
    """Orders of one run, one after the other."""

    def __init__(self, run: Run, newest: tuple[str, int, int] | None = None) -> None:
        self.sent: list[Command] = []
        cadence = Cadence(run.description.checkpoint_every, ManualClock())
        self.orders = Orders(run, newest, QueuedDisk(run), self.sent.append, cadence)
        self.step = 0

    def next(self) -> SnapshotOrder:
        self.step += 10
        self.orders.saving.stepped(self.step - 10, self.step, [])
        self.orders.order_due(self.step, trained=False)
        order = self.sent[-1]
        assert isinstance(order, SnapshotOrder)
        assert order.global_step == self.step
        return order


def test_the_next_checkpoint_continues_the_one_that_was_committed_last(tmp_path: Path) -> None:
    ordering = Ordering(run_of(tmp_path))
    first = ordering.next()
    assert first.base == ""
    ordering.orders.taken(first)
    second = ordering.next()
    assert second.base == "checkpoints/step-00000010"
    ordering.orders.failed(Failed(second, "no space"))
    third = ordering.next()
    assert third.base == "checkpoints/step-00000010"
    number = ordering.orders.request(third.global_step)
    ordering.orders.failed(Failed(third, "it was read back"), damaged=True)
    assert ordering.orders.is_lost(number)
    assert ordering.next().base == "", "its parts would be in the next"
    assert to_order(third).base == third.base


def test_shards_are_told_when_all_rows_are_to_be_written_again(tmp_path: Path) -> None:
    for name in ("run", "other"):
        (tmp_path / name).mkdir()
    run, other = run_of(tmp_path / "run"), run_of(tmp_path / "other")
    other = replace(other, description=replace(other.description, full_checkpoint_every=3))
    orders = [to_order(Ordering(each).next()) for each in (run, other)]
    orders.append(types.SnapshotOrder())
    assert [from_order(order).parts for order in orders] == [16, 3, 16]


def test_a_snapshot_that_is_not_written_is_no_base(tmp_path: Path) -> None:
    ordering = Ordering(run_of(tmp_path))
    ordering.orders.taken(SnapshotOrder("epoch-0", 5, keep=True))
    assert ordering.next().base == ""


@pytest.mark.parametrize(
    ("newest", "restored", "base"),
    [
        (("step-00000005", 1, 5), False, ""),
        (("step-00000005.g2", 2, 5), False, "checkpoints/step-00000005.g2"),
        (("step-00000005.g2", 2, 5), True, ""),
    ],
)
def test_a_checkpoint_of_another_history_is_none(
    tmp_path: Path, newest: tuple[str, int, int], restored: bool, base: str
) -> None:
    run = replace(run_of(tmp_path), generation=3, since=2)
    if restored:
        run = replace(run, since=3, restored=RestoredCheckpoint(newest[0], 5))
    assert Ordering(run, newest).next().base == base


def test_without_tables_nothing_is_said_of_it(tmp_path: Path) -> None:
    ordering = Ordering(run_of(tmp_path, tables=False))
    for _ in range(2):
        order = ordering.next()
        assert order.base == ""
        ordering.orders.taken(order)


def report_of(*rows: str, file: str = "shard-0-of-1.safetensors") -> pb.ReportSnapshotRequest:
    return pb.ReportSnapshotRequest(
        file=file,
        nbytes=3,
        sha256="aa",
        rows=[pb.RowsFile(file=r, nbytes=5, sha256="bb") for r in rows],
    )


def test_a_report_names_the_files_of_rows() -> None:
    found = from_snapshot_report(
        report_of("rows-0-of-1-0.safetensors", "rows-0-of-1-1.safetensors")
    ).file
    assert found.rows == tuple(
        RowsFileEntry(f"rows-0-of-1-{n}.safetensors", 5, "bb") for n in range(2)
    )
    for name in ("../x", "/etc/passwd", ".hidden"):
        with pytest.raises(InvalidArgument, match="expected a plain file name"):
            from_snapshot_report(report_of("rows-0-of-1-0.safetensors", name))


def taken(run: Run, step: int, missing: str = "") -> Taken:
    """A checkpoint of one shard with two files of rows, of which one may be ``missing``."""
    name = f"step-{step:08d}"
    order = SnapshotOrder(name, step, write=True, directory=temporary_directory(name))
    Checkpoints(run).prepare(order)
    names = ["a", "rows-0-of-1-0.safetensors", "rows-0-of-1-1.safetensors"]
    for file in names:
        if file != missing:
            (run.run_dir / order.directory / file).write_bytes(b"abc")
    digest = hashlib.sha256(b"abc").hexdigest()
    rows = tuple(RowsFileEntry(file, 3, digest) for file in names[1:])
    return Taken(order, (ShardFile(0, step, "a", 3, digest, rows),))


def test_a_checkpoint_is_committed_with_all_its_files_or_not(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert commit_checkpoint(Checkpoints(run), taken(run, 1), 1, {}, ()).error == ""
    manifest = read_manifest(tmp_path / "checkpoints" / "step-00000001")
    assert [entry.name for entry in manifest.every] == [
        "a",
        "rows-0-of-1-0.safetensors",
        "rows-0-of-1-1.safetensors",
    ]
    refused = commit_checkpoint(
        Checkpoints(run), taken(run, 2, missing="rows-0-of-1-1.safetensors"), 1, {}, ()
    )
    assert "rows-0-of-1-1.safetensors" in refused.error
    assert not (tmp_path / "checkpoints" / "step-00000002").exists()


def test_one_that_does_not_come_back_from_the_disk_is_told(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    checkpoints = Checkpoints(run)
    keep = run.description.keep_checkpoints
    for step in range(1, keep + 2):
        found = taken(run, step)
        if step == keep + 1:
            rows = tmp_path / found.order.directory / "rows-0-of-1-0.safetensors"
            rows.write_bytes(b"abd")
        committed = commit_checkpoint(checkpoints, found, 1, {}, ())
        assert committed.error == ""
        assert committed.damaged == (step == keep + 1)
    assert "a checkpoint is damaged" in committed.warnings[0]
