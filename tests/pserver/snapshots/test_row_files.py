"""Rows of real tables in checkpoints: written beside training, put together for any shards."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import RLock

import numpy as np
import pytest

from pserver.core.requests import Snapshot
from pserver.snapshots import row_files
from pserver.snapshots.writer import MAX_PENDING, SnapshotWriter
from pserver.tables.tables import Tables
from psrpc.checkpoint import rows_file
from psrpc.checkpoint.checkpoint import newest_good
from psrpc.checkpoint.directory import remove_checkpoint
from psrpc.checkpoint.shard_file import NDArray
from psrpc.core.commands import Begin
from psrpc.core.errors import CheckpointError
from psrpc.core.tables import Rows, TableSpec
from psrpc.files.storage import DISK, Disk, Written
from tests.pserver.shards import engine_of
from tests.pserver.table_shards import Job, everything, merged, plan_of
from tests.psrpc.rows import UNIFORM


@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_chain_of_parts_restores_into_any_number_of_shards(tmp_path: Path, before: int) -> None:
    job = Job(tmp_path, before)
    job.train(30, ids=20, span=1000)
    base = ""
    for _ in range(3):
        base = job.checkpoint(base)
        job.train(2, ids=4)
    base = job.checkpoint(base)
    assert job.parts(base) == [4] * before
    assert sum(table.evicted for tables in job.held for table in tables.tables)
    assert job.everything()[0][1], "candidates"
    for after in (1, 2, 3):
        found = merged(everything(tables) for tables in job.restored(base, after))
        assert found == job.everything()


def test_rows_go_from_shards_to_shards_beside_slices_and_back(tmp_path: Path) -> None:
    jobs = [Job(tmp_path / str(slices), 2, slices=slices) for slices in (0, 2)]
    for job in jobs:
        job.train(20, ids=20)
        base = job.checkpoint()
        job.train(2, ids=4)
        base = job.checkpoint(base)
        assert job.parts(base) == [2, 2, *[0] * job.slices]
        for after, slices in ((2, 0), (2, 1), (1, 1), (3, 2)):
            found = merged(map(everything, job.restored(base, after, slices)))
            assert found == job.everything()
    assert jobs[0].everything() == jobs[1].everything()


def test_files_written_whole_and_in_parts_are_the_same(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.train(20, ids=20)
    for _ in range(2):
        job.train(1)
        base = job.checkpoint()
    job.train(2)
    parts = job.checkpoint(base)
    job.generation += 1
    job.version += 1  # for another name
    whole = job.checkpoint(base)
    assert (job.parts(parts), job.parts(whole)) == ([2, 2], [1, 1])
    found = [merged(map(everything, job.restored(name, 2))) for name in (parts, whole)]
    assert found[0] == found[1] == job.everything()


def test_a_chain_survives_that_its_base_is_removed(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train(10)
    first = job.checkpoint()
    job.train(1, ids=2)
    second = job.checkpoint(first)
    remove_checkpoint(tmp_path / first)
    job.train(1, ids=2)
    third = job.checkpoint(second)
    remove_checkpoint(tmp_path / second)
    assert job.parts(third) == [3]
    assert newest_good(tmp_path / "checkpoints").directory == tmp_path / third
    assert merged(map(everything, job.restored(third, 2))) == job.everything()


class Between(Disk):
    """A disk on which something happens between any two pieces of a file of rows."""

    job: Job
    busy = True
    pieces = 0

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> Written:
        return super().write(path, self._between(parts) if "rows" in path.name else parts)

    def _between(self, parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for part in parts:
            self.pieces += 1
            yield part
            if self.busy:
                self.job.train(1)


def test_updates_between_blocks_do_not_change_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_file, "WRITE_NBYTES", 64)
    monkeypatch.setattr(row_files, "_RANGE", 7)
    disk = Between()
    job = disk.job = Job(tmp_path, storage=disk)
    disk.busy = False
    job.train(30)
    first = job.checkpoint()
    job.train(2)
    then, version, pieces = job.everything(), job.version, disk.pieces
    disk.busy = True
    reports = job.report(first)
    assert disk.pieces > pieces + 20
    assert job.everything() != then
    assert job.held[0].tables[1].evicted
    now, job.version = job.version, version
    second = job.commit(reports)
    assert job.parts(second) == [2]
    assert merged(map(everything, job.restored(second, 1))) == then
    # What was changed meanwhile is in the next part.
    disk.busy, job.version = False, now
    third = job.checkpoint(second)
    assert merged(map(everything, job.restored(third, 1))) == job.everything()


def test_the_lock_is_held_for_blocks_and_not_for_the_disk(tmp_path: Path) -> None:
    held = RLock()
    written = []

    class Watching(Disk):
        def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> Written:
            def watched() -> Iterator[bytes | memoryview]:
                for part in parts:
                    written.append(held._is_owned())  # type: ignore[attr-defined]
                    yield part

            return super().write(path, watched())

    job = Job(tmp_path, storage=Watching(), lock=held)
    job.train(3)
    job.checkpoint()
    assert len(written) > 10
    assert not any(written)


def test_a_disk_that_is_full_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    class Full(Disk):
        full = False

        def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> Written:
            if self.full and "rows" in path.name:
                path.write_bytes(bytes(next(iter(parts))))
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(path, parts)

    disk = Full()
    job = Job(tmp_path, storage=disk)
    job.train(10, ids=30)
    first = job.checkpoint()
    then = job.everything()
    disk.full = True
    job.train(1, ids=2)
    (report,) = job.report(first)
    assert "rows-0-of-1-1.safetensors cannot be written: No space left" in report.error
    assert not report.file.file
    assert newest_good(tmp_path / "checkpoints").directory == tmp_path / first
    assert merged(map(everything, job.restored(first, 1))) == then
    disk.full = False
    job.train(1, ids=2)
    second = job.checkpoint(first)
    assert job.parts(second) == [2]
    assert merged(map(everything, job.restored(second, 1))) == job.everything()


def test_damage_that_is_found_late_leaves_no_rows(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train(10, ids=30)
    first = job.checkpoint()
    job.train(1, ids=2)
    second = job.checkpoint(first)
    path = tmp_path / second / "rows-0-of-1-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x77")
    load = job.files[0].read(second).load_rows
    assert load is not None
    tables = Tables(job.plan, 0)
    with pytest.raises(CheckpointError, match=r"1\.safetensors has SHA-256"):
        load(tables)
    assert [len(table) for table in tables.tables] == [0, 0]


def test_rows_of_other_slots_are_refused_and_leave_none(tmp_path: Path) -> None:
    """The class of the optimizer is the same, and it has momentum now."""
    plain = TableSpec(
        "user", 3, None, UNIFORM, {"class_name": "SGD", "config": {"learning_rate": 0.1}}
    )
    job = Job(tmp_path, tables=(plain,))
    job.train(3)
    first = job.checkpoint()
    momentum = {"class_name": "SGD", "config": {"learning_rate": 0.1, "momentum": 0.9}}
    job.tables = (TableSpec("user", 3, None, UNIFORM, momentum),)
    with pytest.raises(CheckpointError, match="'SGD'; the job has it with 'SGD with momentum'"):
        list(job.restored(first, 1))


def test_a_snapshot_is_closed_whatever_becomes_of_it(tmp_path: Path) -> None:
    class Broken(Disk):
        def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> Written:
            raise OSError(errno.EIO, "Input/output error")

    for storage in (DISK, Broken()):
        job = Job(tmp_path, storage=storage)
        job.train(2)
        job.version += 1000 * isinstance(storage, Broken)
        snapshot = job.snapshot(0)
        report = job.files[0].write(job.order(), snapshot)
        assert bool(report.error) == isinstance(storage, Broken)
        assert _closed(snapshot)


def test_a_column_is_that_of_a_block() -> None:
    job_tables = Tables(plan_of(1), 0)
    rows = {n: Rows(np.arange(40), np.ones((40, w), np.float32)) for n, w in ((0, 3), (1, 2))}
    for version in (1, 2):
        job_tables.apply(rows, 1.0, version - 1, version)
    frozen = job_tables.freeze()
    before = [table.block(table.since(-1)) for table in frozen.tables]
    few = {n: Rows(r.ids[:9] * 2, r.values[:9]) for n, r in rows.items()}
    job_tables.apply(few, 1.0, 2, 3)
    for table, part in zip(frozen.tables, before, strict=True):
        slots = table.since(-1)
        columns: dict[str, NDArray] = {"ids": part.ids, "values": part.values}
        columns |= {"counts": part.counts, "touched": part.touched}
        columns |= {f"slot/{name}": array for name, array in part.slots.items()}
        for name, expected in columns.items():
            np.testing.assert_array_equal(table.column(name, slots), expected)
            assert table.column(name, slots).dtype == expected.dtype


def test_a_shard_that_begins_with_a_checkpoint_has_its_rows(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train(10, ids=30)
    first = job.checkpoint()
    job.train(1, ids=2)
    second = job.checkpoint(first)
    engine = engine_of(job.plan)
    files = job.files[0]
    engine.commands.begin(Begin(2, 1, restore=second), files.read(second))
    assert everything(engine._held.tables) == job.everything()
    assert engine.report().version == job.version
    path = tmp_path / second / "rows-0-of-1-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x77")
    with pytest.raises(CheckpointError, match=r"0\.safetensors has SHA-256"):
        engine.commands.begin(Begin(3, 1, restore=second), files.read(second))
    assert not engine.report().initialized
    assert [len(table) for table in engine._held.tables.tables] == [0, 0]


def test_snapshots_that_are_given_up_are_closed(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train(2)
    writer = SnapshotWriter(job.files[0], lambda _: None)
    writer.begun(1)
    snapshots = [job.snapshot(0) for _ in range(MAX_PENDING + 2)]
    for number, snapshot in enumerate(snapshots[:-1]):
        writer.taken(job.order(name=f"step-{number}"), snapshot)
    kept = replace(job.order(name="kept"), write=False, keep=True)
    writer.taken(kept, snapshots[-1])
    assert [_closed(snapshot) for snapshot in snapshots] == [False] * MAX_PENDING + [True] * 2
    writer.begun(2)
    assert all(map(_closed, snapshots))


def _closed(snapshot: Snapshot) -> bool:
    assert snapshot.tables is not None
    try:
        snapshot.tables.tables[0].since(-1)
    except AssertionError:
        return True
    return False
