"""A shard that is restored again and again admits, evicts and forgets what one does that is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pserver.core.requests import Snapshot
from pserver.engine.parameters import Parameters
from pserver.tables import admission
from pserver.tables.tables import Tables
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.core.tables import Rows, TableSpec
from tests.pserver.shards import MOMENTUM, SGD
from tests.pserver.table_shards import Job
from tests.psrpc.checkpoint.test_corruption import Memory
from tests.psrpc.rows import ADAGRAD, ADAM, UNIFORM

LIMIT, CANDIDATES = 8, 10

TABLES = (
    TableSpec("by age", 2, None, UNIFORM, ADAM, max_rows=LIMIT, eviction="age"),
    TableSpec("by frequency", 2, None, UNIFORM, ADAGRAD, max_rows=LIMIT, eviction="frequency"),
    TableSpec("counted, by age", 1, None, UNIFORM, SGD, 0, 2, LIMIT, "age"),
    TableSpec("counted, by frequency", 1, None, UNIFORM, MOMENTUM, 0, 3, LIMIT, "frequency"),
    TableSpec("counted", 1, 40, UNIFORM, SGD, 0, 3),
)

ids = st.sets(st.integers(0, 39), max_size=6)
update = st.tuples(st.just("update"), ids, ids)
steps = st.lists(
    st.one_of(
        *[update] * 8,
        st.just(("empty update",)),
        st.tuples(st.just("checkpoint"), st.booleans()),
        st.tuples(st.just("restore"), st.booleans()),
        st.tuples(st.just("count anew"), st.integers(0, 5), st.booleans()),
    ),
    min_size=20,
    max_size=40,
)


class Shard(Job):
    """One shard, in memory."""

    def __init__(self) -> None:
        super().__init__(Path("/run"), storage=Memory(), tables=TABLES)
        self.parameters = Parameters(NumpyEngine(SGD, self.plan, 0), 1, self.held[0])
        self.parameters.initialize(self.zeros)
        self.base = ""
        self.written = 0

    @property
    def zeros(self) -> dict[str, Any]:
        return {a.name: np.zeros(a.shard_length(0), a.dtype) for a in self.plan.arenas}

    def snapshot(self, shard: int) -> Snapshot:
        snapshot = self.parameters.snapshot()
        assert snapshot.tables is not None
        return replace(snapshot, let_go=snapshot.tables.close)

    def update(self, number: int, *chosen: set[int]) -> None:
        rows = {}
        for table, spec in enumerate(TABLES):
            its = np.array(sorted(chosen[table % len(chosen)]), np.int64)
            values = np.random.default_rng([number, table]).standard_normal((len(its), spec.width))
            rows[table] = Rows(its, values.astype(np.float32))
        self.parameters.tables.check(rows)
        self.parameters.update(self.zeros, rows=rows)

    def save(self, continued: bool) -> str:
        # For another name, whatever the version.
        self.written += 1
        self.version = self.written
        self.generation = self.parameters.standing.generation
        self.base = self.checkpoint(self.base if continued else "")
        return self.base

    def restore(self, checkpoint: str, version: int | None = None) -> None:
        restored = self.files[0].read(checkpoint)
        self.parameters.forget(self.parameters.standing.generation + 1)
        self.parameters.restore(restored, version)


def agree(one: Tables, other: Tables) -> None:
    """The same rows and candidates, whose versions are in the same order."""
    for spec, ours, theirs in zip(TABLES, one.tables, other.tables, strict=True):
        for mine, yours in zip(_sorted(ours), _sorted(theirs), strict=True):
            for column, expected in zip(mine, yours, strict=True):
                assert column.tobytes() == expected.tobytes(), spec.name


def _sorted(table: Any) -> list[list[Any]]:
    frozen = table.freeze()
    part, counted = frozen.block(frozen.since(-1)), frozen.candidates
    frozen.close()
    slots = [part.slots[name] for name in sorted(part.slots)]
    found = []
    for rows in ([part.ids, part.counts, part.touched, part.values, *slots], list(counted)):
        order = np.argsort(rows[0])
        # Versions may be others where they were counted anew; who is older than who is the same.
        rows[2] = np.unique(rows[2], return_inverse=True)[1]
        found.append([column[order] for column in rows])
    return found


@pytest.mark.slow
@settings(max_examples=25, derandomize=True)
@given(steps=steps)
def test_restores_change_nothing(steps: list[tuple[Any, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "MAX_CANDIDATES", CANDIDATES)
        shard, plain = Shard(), Shard()
    for number, step in enumerate(steps):
        match step:
            case ("update", *chosen):
                for each in (shard, plain):
                    each.update(number, *chosen)
            case ("empty update",):
                for each in (shard, plain):
                    each.parameters.update(None)
            case ("checkpoint", continued):
                shard.save(continued)
            case ("restore", continued):
                shard.restore(shard.save(continued))
            case ("count anew", version, kept):
                generation = plain.parameters.standing.generation + 1
                plain.parameters.keep(generation, version)
                if kept:
                    shard.parameters.keep(shard.parameters.standing.generation + 1, version)
                else:
                    shard.restore(shard.save(True), version)
    agree(shard.parameters.tables, plain.parameters.tables)
