"""Shards with real tables whose rows go into checkpoints and come back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pserver.core.requests import Snapshot, Values
from pserver.snapshots.writer import SnapshotFiles
from pserver.tables.part import TablePart
from pserver.tables.tables import FrozenTables, Tables
from pserver.updates.engine import Slots
from psrpc.checkpoint.checkpoint import ManifestFile, commit
from psrpc.checkpoint.manifest import read_manifest
from psrpc.checkpoint.rows_chain import load_rows
from psrpc.core.commands import SnapshotOrder
from psrpc.core.placement import make_plan
from psrpc.core.plan import Plan
from psrpc.core.shard_reports import SnapshotReport
from psrpc.core.tables import FULL_EVERY, Rows, TableSpec, shard_of
from psrpc.files.durable import make_directory
from psrpc.files.storage import DISK, Storage
from tests.pserver.shards import identity_of
from tests.pserver.tables.table_cases import marks_of
from tests.psrpc.builders import RUN, manifest_of
from tests.psrpc.rows import ADAGRAD, ADAM, UNIFORM, VARIABLES

TABLES = (
    TableSpec("user", 3, None, UNIFORM, ADAM, min_count=2),
    TableSpec("item", 2, None, UNIFORM, ADAGRAD, max_rows=60, eviction="age"),
)
Everything = list[tuple[dict[int, tuple[bytes, ...]], dict[int, tuple[int, int]]]]


def plan_of(shards: int, tables: tuple[TableSpec, ...] = TABLES, slices: int = 0) -> Plan:
    """``shards`` have rows; ``slices``, which follow them, have none."""
    return make_plan(VARIABLES, shards + slices, "cut", tables, slices)


def everything(tables: Tables | FrozenTables) -> Everything:
    """All rows of all tables, and their candidates: how often each was named, and when last."""
    frozen = tables if isinstance(tables, FrozenTables) else tables.freeze()
    found: Everything = []
    for table in frozen.tables:
        part = table.block(table.since(-1))
        found.append((_rows(part), marks_of(table.candidates)))
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
    most: int = FULL_EVERY
    slices: int = 0

    def __post_init__(self) -> None:
        self.plan = plan_of(self.shards, self.tables, self.slices)
        self.held = [Tables(self.plan, shard) for shard in range(self.shards)]
        self.files = [
            SnapshotFiles(identity_of(k), self.plan, RUN, self.root, self.storage)
            for k in range(self.plan.shards)
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
        snapshot = Snapshot(
            Values(self.version, self.generation, values),
            Slots(scalars={"iterations": np.asarray(self.version)}),
            (),
            lock=self.lock,
        )
        if shard >= self.shards:
            return snapshot
        frozen = self.held[shard].freeze()
        return replace(snapshot, tables=frozen, let_go=frozen.close)

    def order(self, base: str = "", name: str = "") -> SnapshotOrder:
        name = name or f"step-{self.version:08d}"
        directory = f"checkpoints/.tmp-{name}"
        make_directory(self.root / directory, self.storage)
        return SnapshotOrder(name, self.version, True, False, directory, base, self.most)

    def report(self, base: str = "") -> list[SnapshotReport]:
        order = self.order(base)
        return [f.write(order, self.snapshot(k)) for k, f in enumerate(self.files)]

    def checkpoint(self, base: str = "") -> str:
        """A committed one, by its name relative to the run directory."""
        reports = self.report(base)
        assert [report.error for report in reports] == [""] * self.plan.shards
        return self.commit(reports)

    def commit(self, reports: list[SnapshotReport]) -> str:
        files = [
            ManifestFile(
                file.shard,
                file.file,
                file.nbytes,
                file.sha256,
                file.version,
                file.rows,
                file.evicted,
            )
            for file in (report.file for report in reports)
        ]
        manifest = manifest_of(self.plan, files, self.version)
        manifest = replace(manifest, generation=self.generation)
        checkpoints = self.root / "checkpoints"
        temporary = checkpoints / f".tmp-{manifest.name}"
        commit(temporary, checkpoints / manifest.name, manifest, self.storage)
        return f"checkpoints/{manifest.name}"

    def parts(self, checkpoint: str) -> list[int]:
        return [
            len(file.rows) for file in read_manifest(self.root / checkpoint, self.storage).files
        ]

    def restored(self, checkpoint: str, shards: int, slices: int = 0) -> Iterator[Tables]:
        plan = plan_of(shards, self.tables, slices)
        for slice_ in range(shards, plan.shards):
            files = SnapshotFiles(identity_of(slice_), plan, RUN, self.root, self.storage)
            assert files.read(checkpoint).load_rows is None
            assert not list(load_rows(self.root / checkpoint, plan, slice_))
        for shard in range(shards):
            tables = Tables(plan, shard)
            files = SnapshotFiles(identity_of(shard), plan, RUN, self.root, self.storage)
            load = files.read(checkpoint).load_rows
            assert load is not None
            load(tables)
            yield tables

    def everything(self) -> Everything:
        return merged(everything(tables) for tables in self.held)
