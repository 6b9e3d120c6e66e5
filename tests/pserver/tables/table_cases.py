"""Tables of the tests, and a model of one: plain Python, a row at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pserver.tables.admission import CANDIDATES_PER_ROW, MAX_CANDIDATES
from pserver.tables.initial import InitialRows
from pserver.tables.part import Counted
from pserver.tables.table import Table
from psrpc.core.tables import Ids, Rows, TableSpec, mix

UNIFORM = {"class_name": "uniform", "config": {"low": -0.5, "high": 0.5}}


def optimizer(name: str = "SGD", **config: Any) -> dict[str, Any]:
    return {"class_name": name, "config": {"learning_rate": 0.125} | config}


def spec(**changes: Any) -> TableSpec:
    fields: dict[str, Any] = {
        "name": "items",
        "width": 3,
        "vocabulary": None,
        "initializer": UNIFORM,
        "optimizer": optimizer(),
    }
    return TableSpec(**fields | changes)


def marks_of(counted: Counted) -> dict[int, tuple[int, int]]:
    """How often each candidate was named, and by which version last."""
    ids, counts, touched = (array.tolist() for array in counted)
    return dict(zip(ids, zip(counts, touched, strict=True), strict=True))


def ids_of(*ids: int) -> Ids:
    return np.array(ids, np.int64)


def gradients(ids: npt.ArrayLike, width: int = 3, seed: int = 0) -> Rows:
    sorted_ids = np.sort(np.asarray(ids, np.int64))
    values = np.random.default_rng(seed).normal(size=(len(sorted_ids), width))
    return Rows(sorted_ids, values.astype(np.float32))


class Row:
    def __init__(self, value: npt.NDArray[np.float32], count: int, touched: int) -> None:
        self.value, self.velocity = value.copy(), np.zeros_like(value)
        self.count, self.touched = count, touched

    def copy(self) -> Row:
        other = Row(self.value, self.count, self.touched)
        other.velocity = self.velocity.copy()
        return other


class Model:
    """A table with SGD, learning rate 1/8 and momentum 1/2, of one shard."""

    OPTIMIZER = optimizer(momentum=0.5)

    def __init__(self, spec: TableSpec, max_candidates: int = MAX_CANDIDATES) -> None:
        self.spec = spec
        self._most = min(max_candidates, CANDIDATES_PER_ROW * (spec.max_rows or max_candidates))
        self.rows: dict[int, Row] = {}
        self.candidates: dict[int, tuple[int, int]] = {}
        self.removed: list[tuple[int, int]] = []
        self.evicted: dict[int, Row] = {}
        self._initial = InitialRows(spec)

    def copy(self) -> Model:
        other = Model(self.spec, self._most)
        other.rows = {i: row.copy() for i, row in self.rows.items()}
        other.candidates = dict(self.candidates)
        other.removed = list(self.removed)
        other.evicted = dict(self.evicted)
        return other

    def initial(self, i: int) -> npt.NDArray[np.float32]:
        row = np.empty(self.spec.width, np.float32)
        self._initial.fill(ids_of(i), row[None])
        return row

    def read(self, i: int) -> npt.NDArray[np.float32]:
        return self.rows[i].value if i in self.rows else self.initial(i)

    def apply(self, rows: Rows, rate_scale: float, version: int) -> None:
        named = [int(i) for i in rows.ids]
        new = []
        for i in named:
            if i in self.rows:
                self.rows[i].count += 1
                self.rows[i].touched = version
                continue
            count = self.candidates.pop(i, (0, 0))[0] + 1
            if count >= self.spec.min_count:
                new.append((i, count))
            else:
                self.candidates[i] = (count, version)
        if (over := len(self.candidates) - self._most) > 0:
            known = sorted(self.candidates, key=lambda i: (*self.candidates[i], _hash(i)))
            for i in known[: over + self._most // 16]:
                del self.candidates[i]
        limit = self.spec.max_rows
        if limit is not None and len(self.rows) + len(new) > limit:
            others = sorted(self.rows.keys() - set(named), key=self._worth)
            over = len(self.rows) + len(new) - limit
            for i in others[: max(over, limit // 16)]:
                self.evicted[i] = self.rows.pop(i)
                self.removed.append((version, i))
        for i, count in new:
            self.rows[i] = Row(self.initial(i), count, version)
        rate = np.float32(0.125) * np.float32(rate_scale)
        for i, gradient in zip(named, rows.values, strict=True):
            if i in self.rows:
                row = self.rows[i]
                row.velocity = row.velocity * np.float32(0.5) - gradient * rate
                row.value = row.value + row.velocity

    def _worth(self, i: int) -> tuple[int, int, int]:
        row = self.rows[i]
        first = (row.touched, row.count)
        order = first if self.spec.eviction == "age" else first[::-1]
        return (*order, _hash(i))


def _hash(i: int) -> int:
    return int(mix(ids_of(i))[0])


def content(table: Table) -> dict[Any, Any]:
    """Rows with slots, counts and versions by id, and the candidates."""
    frozen = table.freeze()
    part = frozen.block(frozen.since(-1))
    frozen.close()
    columns = (part.values, *part.slots.values(), part.counts, part.touched)
    return {
        int(i): [column[k].tolist() for column in columns] for k, i in enumerate(part.ids.tolist())
    } | {"candidates": marks_of(table.admission.candidates())}


def apply(table: Table, *ids: int, version: int = 1) -> None:
    """Applies seeded gradients of ``ids`` that passed the check."""
    rows = gradients(ids, table.spec.width, seed=version)
    table.check(rows)
    table.apply(rows, 1.0, version - 1, version)
