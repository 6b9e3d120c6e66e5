"""Rows of real tables in checkpoints: written beside training, put together for any shards."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock

import numpy as np
import pytest

from pserver import row_files
from pserver.requests import Begin, Snapshot, SnapshotOrder, Values
from pserver.snapshots import MAX_PENDING, SnapshotFiles, SnapshotWriter
from pserver.tables.part import TablePart
from pserver.tables.tables import FrozenTables, Tables
from pserver.updates.engine import Slots
from psrpc import rows_file
from psrpc.checkpoint import ManifestFile, RowsFileEntry, commit, newest_good
from psrpc.errors import CheckpointError
from psrpc.manifest import read_manifest, remove_checkpoint
from psrpc.plan import Plan, VariableSpec, make_plan
from psrpc.shard_file import NDArray
from psrpc.storage import DISK, Disk, Storage, Written
from psrpc.tables import Rows, TableSpec, shard_of
from psrpc.v1 import coordinator_pb2 as pb
from tests.pserver.shards import engine_of, identity_of
from tests.psrpc.rows import RUN, manifest_of

UNIFORM = {"class_name": "uniform", "config": {"low": -0.05, "high": 0.05}}
ADAM = {"class_name": "Adam", "config": {"learning_rate": 0.1}}
ADAGRAD = {"class_name": "RowwiseAdagrad", "config": {"learning_rate": 0.1}}
TABLES = (
    TableSpec("user", 3, None, UNIFORM, ADAM, min_count=2),
    TableSpec("item", 2, None, UNIFORM, ADAGRAD, max_rows=60, eviction="age"),
)
VARIABLES = (VariableSpec("bias", (4,), "float32", "trainable"),)

Everything = list[tuple[dict[int, tuple[bytes, ...]], dict[int, int]]]


def plan_of(shards: int, tables: tuple[TableSpec, ...] = TABLES) -> Plan:
    return make_plan(VARIABLES, shards, "cut", tables)


def everything(tables: Tables | FrozenTables) -> Everything:
    """All rows of all tables, and their candidates."""
    frozen = tables if isinstance(tables, FrozenTables) else tables.freeze()
    found: Everything = []
    for table in frozen.tables:
        part = table.block(table.since(-1))
        found.append((_rows(part), dict(zip(*(a.tolist() for a in table.candidates), strict=True))))
    if frozen is not tables:
        frozen.close()
    return found


def _rows(part: TablePart) -> dict[int, tuple[bytes, ...]]:
    columns = [part.values, *part.slots.values(), part.counts, part.touched]
    return {
        id_: tuple(column[n].tobytes() for column in columns)
        for n, id_ in enumerate(part.ids.tolist())
    }


def merged(shards: Iterable[Everything]) -> Everything:
    found: Everything = [({}, {}), ({}, {})]
    for tables in shards:
        for number, (rows, candidates) in enumerate(tables):
            found[number][0].update(rows)
            found[number][1].update(candidates)
    return found


@dataclass
class Job:
    """Shards that train and write checkpoints, with the coordinator's part of it."""

    root: Path
    shards: int = 1
    storage: Storage = DISK
    tables: tuple[TableSpec, ...] = TABLES
    lock: AbstractContextManager[object] = field(default_factory=nullcontext)
    generation: int = 1
    version: int = 0

    def __post_init__(self) -> None:
        self.plan = plan_of(self.shards, self.tables)
        self.held = [Tables(self.plan, shard) for shard in range(self.shards)]
        self.files = [
            SnapshotFiles(identity_of(k), self.plan, RUN, self.root, self.storage)
            for k in range(self.shards)
        ]

    def train(self, updates: int, ids: int = 8, span: int = 100) -> None:
        for _ in range(updates):
            self.version += 1
            random = np.random.default_rng(self.version)
            for shard, tables in enumerate(self.held):
                rows = {}
                for table, spec in enumerate(self.tables):
                    drawn = np.unique(random.integers(0, span, ids))
                    drawn = drawn[shard_of(drawn, self.shards) == np.uint64(shard)]
                    gradients = random.standard_normal((drawn.size, spec.width))
                    rows[table] = Rows(drawn, gradients.astype(np.float32))
                tables.check(rows)
                tables.apply(rows, 1.0, self.version - 1, self.version)

    def snapshot(self, shard: int) -> Snapshot:
        values = {a.name: np.zeros(a.shard_length(shard), a.dtype) for a in self.plan.arenas}
        frozen = self.held[shard].freeze()
        return Snapshot(
            Values(self.version, self.generation, values),
            Slots(scalars={"iterations": np.asarray(self.version)}),
            (),
            tables=frozen,
            lock=self.lock,
            let_go=frozen.close,
        )

    def order(self, base: str = "", name: str = "") -> SnapshotOrder:
        name = name or f"step-{self.version:08d}"
        directory = f"checkpoints/.tmp-{name}"
        (self.root / directory).mkdir(parents=True, exist_ok=True)
        return SnapshotOrder(name, True, False, directory, self.version, base)

    def report(self, base: str = "") -> list[pb.ReportSnapshotRequest]:
        order = self.order(base)
        return [f.write(order, self.snapshot(k)) for k, f in enumerate(self.files)]

    def checkpoint(self, base: str = "") -> str:
        """A committed one, by its name relative to the run directory."""
        reports = self.report(base)
        assert [report.error for report in reports] == [""] * self.shards
        return self.commit(reports)

    def commit(self, reports: list[pb.ReportSnapshotRequest]) -> str:
        files = [
            ManifestFile(
                report.shard,
                report.file,
                report.nbytes,
                report.sha256,
                report.version,
                tuple(_entry(r) for r in report.rows),
                _entry(report.evicted) if report.HasField("evicted") else None,
            )
            for report in reports
        ]
        manifest = manifest_of(self.plan, files, self.version)
        manifest = replace(manifest, generation=self.generation)
        checkpoints = self.root / "checkpoints"
        commit(checkpoints / f".tmp-{manifest.name}", checkpoints / manifest.name, manifest)
        return f"checkpoints/{manifest.name}"

    def parts(self, checkpoint: str) -> list[int]:
        return [len(file.rows) for file in read_manifest(self.root / checkpoint).files]

    def restored(self, checkpoint: str, shards: int) -> Iterator[Tables]:
        plan = plan_of(shards, self.tables)
        for shard in range(shards):
            tables = Tables(plan, shard)
            files = SnapshotFiles(identity_of(shard), plan, RUN, self.root)
            load = files.read(checkpoint).load_rows
            assert load is not None
            load(tables)
            yield tables

    def everything(self) -> Everything:
        return merged(everything(tables) for tables in self.held)


def _entry(file: pb.RowsFile) -> RowsFileEntry:
    return RowsFileEntry(file.file, file.nbytes, file.sha256)


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


def test_what_is_written_whole_and_in_parts_is_the_same(tmp_path: Path) -> None:
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


def test_what_is_not_known_to_continue_is_written_whole(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train(10, ids=30)
    first = job.checkpoint()

    def next_parts(base: str) -> int:
        job.train(1, ids=2)
        return job.parts(job.checkpoint(base))[0]

    assert next_parts(first) == 2
    assert next_parts("") == 1
    assert next_parts("checkpoints/step-99999999") == 1
    job.generation = 2
    assert next_parts(first) == 1
    other = Job(tmp_path)  # the same shard, started again
    other.version, other.held, other.generation = job.version, job.held, 2
    other.train(1, ids=2)
    assert other.parts(other.checkpoint(f"checkpoints/step-{job.version:08d}"))[0] == 1


def test_so_many_parts_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "MAX_PARTS", 3)
    job = Job(tmp_path)
    job.train(10, ids=40)
    base = ""
    counts = []
    for _ in range(5):
        base = job.checkpoint(base)
        counts += job.parts(base)
        job.train(1, ids=2)
    assert counts == [1, 2, 3, 1, 2]


def test_a_part_of_more_than_half_or_parts_of_more_than_twice_are_not_worth_it(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, tables=(TableSpec("user", 3, None, UNIFORM, ADAM),))

    def touch(first: int, stop: int) -> None:
        job.version += 1
        rows = Rows(np.arange(first, stop), np.ones((stop - first, 3), np.float32))
        job.held[0].apply({0: rows}, 1.0, job.version - 1, job.version)

    touch(0, 100)
    base = job.checkpoint()
    counts = []
    for rows in (51, 50, 40, 11, 10):
        touch(0, rows)
        base = job.checkpoint(base)
        counts += job.parts(base)
    assert counts == [1, 2, 3, 1, 2]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK])
def test_without_links_rows_are_written_whole(tmp_path: Path, number: int) -> None:
    class NoLinks(Disk):
        links = 0

        def link(self, old: Path, new: Path) -> None:
            self.links += 1
            if self.links > 2:  # half-way through the second chain
                raise OSError(number, "no")
            super().link(old, new)

    job = Job(tmp_path, storage=NoLinks())
    job.train(10, ids=30)
    first = job.checkpoint()
    base = first
    for links in (2, 1, 1):
        job.train(1, ids=2)
        base = job.checkpoint(base)
        assert job.parts(base) == [links]
        assert merged(map(everything, job.restored(base, 1))) == job.everything()


def test_a_base_that_is_gone_is_no_loss(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train(10, ids=30)
    first = job.checkpoint()
    remove_checkpoint(tmp_path / first)
    job.train(1, ids=2)
    assert job.parts(job.checkpoint(first)) == [1]


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
    assert not report.file
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
    with pytest.raises(CheckpointError, match="table 'user' has momentums none in the checkpoint"):
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
    engine.begin(Begin(2, 1, restore=second), files.read(second))
    assert everything(engine._held.tables) == job.everything()
    assert engine.report().version == job.version
    path = tmp_path / second / "rows-0-of-1-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x77")
    with pytest.raises(CheckpointError, match=r"0\.safetensors has SHA-256"):
        engine.begin(Begin(3, 1, restore=second), files.read(second))
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
