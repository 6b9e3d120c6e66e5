"""Tables that are dictionaries, and checkpoints of them: what the files have to agree with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from psrpc.checkpoint.checkpoint import ShardState
from psrpc.checkpoint.manifest import read_manifest
from psrpc.checkpoint.rows_chain import Removed, RowsStep, SavedCandidates
from psrpc.checkpoint.rows_file import RowsHeader, TableRows, rows_file_name, write_rows_file
from psrpc.checkpoint.rows_reader import RowsBlock
from psrpc.checkpoint.shard_file import NDArray
from psrpc.core.placement import make_plan
from psrpc.core.plan import Plan, VariableSpec
from psrpc.core.shard_reports import RowsFileEntry
from psrpc.core.tables import TableSpec, shard_of
from psrpc.files.durable import make_directory
from psrpc.files.storage import DISK, Storage
from tests.psrpc.builders import RUN, write_and_commit

UNIFORM = {"class_name": "uniform", "config": {"low": -0.05, "high": 0.05}}
ADAM = {"class_name": "Adam", "config": {"learning_rate": 0.1}}
ADAGRAD = {"class_name": "RowwiseAdagrad", "config": {"learning_rate": 0.1}}
TABLES = (
    TableSpec("user", 3, None, UNIFORM, ADAM, seed=1),
    TableSpec("items/new", 2, 1000, UNIFORM, ADAGRAD),
)
SLOTS: tuple[Mapping[str, int], ...] = ({"m": 3, "v": 3}, {"accumulator": 1})
VARIABLES = (VariableSpec("bias", (4,), "float32", "trainable"),)


def plan_of(shards: int, tables: Sequence[TableSpec] = TABLES) -> Plan:
    return make_plan(VARIABLES, shards, "cut", tables)


@dataclass
class Row:
    values: NDArray
    slots: dict[str, NDArray]
    count: int
    touched: int

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Row)
        if (self.count, self.touched) != (other.count, other.touched):
            return False
        pairs = [(array, other.slots[name]) for name, array in self.slots.items()]
        # As lists, which takes a fifth of the time for rows as short as these.
        return all(a.tolist() == b.tolist() for a, b in [(self.values, other.values), *pairs])


Contents = list[tuple[dict[int, Row], dict[int, tuple[int, int]]]]
"""Rows and candidates of each table."""


@dataclass
class DictTable:
    """A table, or what one shard has of it."""

    spec: TableSpec
    slots: Mapping[str, int]
    rows: dict[int, Row] = field(default_factory=dict)
    removed: list[tuple[int, int]] = field(default_factory=list)
    candidates: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Count and version."""

    def touch(self, ids: Iterable[int], version: int) -> None:
        for id_ in ids:
            old = self.rows.get(id_)
            row = np.random.default_rng([id_ % (1 << 63), version]).standard_normal
            self.rows[id_] = Row(
                row(self.spec.width).astype(np.float32),
                {name: row(width).astype(np.float32) for name, width in self.slots.items()},
                1 if old is None else old.count + 1,
                version,
            )

    def remove(self, ids: Iterable[int], version: int) -> None:
        for id_ in ids:
            del self.rows[id_]
            self.removed.append((version, id_))

    def part(self, shard: int, shards: int, since: int = -1) -> TableRows:
        """The part of it that a shard writes."""
        there = {
            id_: row
            for id_, row in self.rows.items()
            if row.touched > since and _shard(id_, shards) == shard
        }
        rows, ids = list(there.values()), np.array(list(there), np.int64)
        columns: dict[str, NDArray] = {
            "ids": ids,
            "values": _stack([row.values for row in rows], self.spec.width),
            "counts": np.array([row.count for row in rows], np.uint32),
            "touched": np.array([row.touched for row in rows], np.uint32),
        }
        for name, width in self.slots.items():
            columns[f"slot/{name}"] = _stack([row.slots[name] for row in rows], width)
        own = {i: marks for i, marks in self.candidates.items() if _shard(i, shards) == shard}
        counts, touched = np.array(list(own.values()), np.uint32).reshape(-1, 2).T
        gone = [i for at, i in self.removed if at > since >= 0 and _shard(i, shards) == shard]
        return TableRows(
            self.spec,
            len(rows),
            self.slots,
            lambda column, start, stop: columns[column][start:stop],
            np.array(gone, np.int64),
            (np.array(list(own), np.int64), counts, touched),
        )

    def take(self, step: RowsStep) -> None:
        """Restores."""
        match step:
            case Removed(ids):
                for id_ in ids.tolist():
                    self.rows.pop(id_, None)
            case SavedCandidates(ids, counts, touched):
                marks = zip(counts.tolist(), touched.tolist(), strict=True)
                self.candidates.update(zip(ids.tolist(), marks, strict=True))
            case RowsBlock():
                for n, id_ in enumerate(step.ids.tolist()):
                    slots = {name: array[n] for name, array in step.slots.items()}
                    self.rows[id_] = Row(
                        step.values[n], slots, int(step.counts[n]), int(step.touched[n])
                    )


def tables_of() -> list[DictTable]:
    return [DictTable(spec, slots) for spec, slots in zip(TABLES, SLOTS, strict=True)]


def _shard(id_: int, shards: int) -> int:
    return int(shard_of(np.array([id_], np.int64), shards)[0])


def _stack(rows: Sequence[NDArray], width: int) -> NDArray:
    return np.stack(rows) if rows else np.zeros((0, width), np.float32)


def write_checkpoint(
    root: Path,
    plan: Plan,
    tables: Sequence[DictTable],
    step: int,
    base: Path | None = None,
    storage: Storage = DISK,
    run: str = RUN,
    states: Sequence[ShardState] | None = None,
) -> Path:
    """A committed checkpoint, which continues the parts of ``base``."""
    temporary = root / ".tmp-writing"
    make_directory(temporary, storage)
    before = read_manifest(base, storage) if base else None

    def state_of(shard: int) -> ShardState:
        values = {a.name: np.full(a.shard_length(shard), step, a.dtype) for a in plan.arenas}
        return ShardState(values, version=step)

    def write_rows(shard: int) -> list[RowsFileEntry]:
        rows = list(before.files[shard].rows) if before else []
        for entry in rows:
            assert base is not None
            storage.link(base / entry.name, temporary / entry.name)
        header = RowsHeader(
            shard=shard,
            shards=plan.shards,
            plan_hash=plan.hash.hex(),
            run_id=run,
            generation=1,
            global_step=step,
            version=step,
            part=len(rows),
            after=rows[-1].sha256 if rows else "",
            tables=plan.tables,
            slots=[table.slots for table in tables],
            rows=[len(table.rows) for table in mine(tables, shard, plan.shards)],
        )
        since = before.files[shard].version if before else -1
        if tables:
            part = write_rows_file(
                temporary / rows_file_name(shard, plan.shards, len(rows)),
                header,
                [table.part(shard, plan.shards, since) for table in tables],
                storage,
            )
            rows.append(RowsFileEntry(part.name, part.nbytes, part.sha256))
        return rows

    states = states or list(map(state_of, range(plan.shards)))
    return write_and_commit(
        temporary, plan, states, step, run=run, storage=storage, rows_of=write_rows
    )


def restored(steps: Iterator[tuple[int, RowsStep]]) -> list[DictTable]:
    """Tables that were put together from ``steps``."""
    found = tables_of()
    for number, step in steps:
        found[number].take(step)
    return found


def trained() -> Iterator[tuple[int, list[DictTable]]]:
    """The same tables at versions 10, 20, 30: rows are updated, removed and created again."""
    user, items = tables = tables_of()
    user.touch(range(-20, 20), 3)
    user.touch([1 << 62, -(1 << 63)], 4)
    items.touch(range(0, 60, 2), 5)
    user.candidates = {1000: (1, 4), 1001: (2, 9)}
    yield 10, tables
    user.touch(range(5), 12)
    user.remove([-20, -19, 3], 13)
    user.touch([-19, 77], 14)
    user.candidates = {1001: (3, 11), 1002: (1, 20)}
    yield 20, tables
    user.remove([77], 21)
    items.remove([0, 2], 22)
    items.touch([2, 11], 23)
    user.touch([3], 24)
    user.candidates = {1002: (2, 26)}
    yield 30, tables


def chain(root: Path, plan: Plan) -> tuple[list[Path], list[DictTable]]:
    """Three checkpoints, each on the one before; and the tables as the last one has them."""
    found: list[Path] = []
    for step, tables in trained():
        base = found[-1] if found else None
        found.append(write_checkpoint(root, plan, tables, step, base))
    return found, tables


def rows_of(tables: Sequence[DictTable]) -> Contents:
    return [(table.rows, table.candidates) for table in tables]


def mine(tables: Sequence[DictTable], shard: int, shards: int) -> list[DictTable]:
    """The rows of ``shard``."""
    return [
        DictTable(
            table.spec,
            table.slots,
            {i: row for i, row in table.rows.items() if _shard(i, shards) == shard},
            [],
            {i: marks for i, marks in table.candidates.items() if _shard(i, shards) == shard},
        )
        for table in tables
    ]
