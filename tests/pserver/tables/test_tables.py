"""All tables of a shard."""

from __future__ import annotations

import numpy as np
import pytest

from pserver.tables.tables import TableFigures, Tables
from psrpc.core.errors import InvalidArgument, ResourceExhausted
from psrpc.core.placement import make_plan
from psrpc.core.plan import VariableSpec
from psrpc.core.tables import shard_of
from tests.pserver.tables.table_cases import gradients, ids_of, spec

DENSE = VariableSpec("dense", (4,), "float32", "trainable")


def two() -> Tables:
    return Tables(make_plan([DENSE], 1, "cut", [spec(), spec(name="users", width=2)]), 0)


def test_each_gets_its_own() -> None:
    tables = two()
    rows = {1: gradients([4, 5], 2), 0: gradients([7])}
    tables.check(rows)
    frozen = tables.freeze()
    tables.apply(rows, 1.0, 0, 1)
    wanted = [(1, ids_of(4)), (0, ids_of(7, 8))]
    tables.check_ids(wanted)
    now = [np.empty((1, 2), np.float32), np.empty((2, 3), np.float32)]
    before = [np.empty_like(array) for array in now]
    tables.read(wanted, now)
    frozen.read(wanted, before)
    assert (now[0] != before[0]).all()
    assert (now[1] != before[1]).any(axis=1).tolist() == [True, False]
    frozen.close()
    items, users = tables.figures()
    assert items == TableFigures("items", 1, items.nbytes, 1, 0, 0, 0)
    assert (users.name, users.rows, users.created) == ("users", 2, 2)
    tables.forget()
    assert [f.rows for f in tables.figures()] == [0, 0]


def test_a_table_that_there_is_not_and_one_named_twice() -> None:
    tables = two()
    with pytest.raises(InvalidArgument, match="table 2 is unknown; this shard has 2"):
        tables.check({2: gradients([1])})
    with pytest.raises(InvalidArgument, match="table 'users' is named more than once"):
        tables.check_ids([(1, ids_of(1)), (0, ids_of(1)), (1, ids_of(2))])


def test_a_slice_has_no_rows_of_any_table() -> None:
    plan = make_plan([DENSE], 3, "cut", [spec(), spec(name="users", width=2)], 1)
    tables = Tables(plan, 2)
    assert (tables.specs, tables.figures(), tables.version) == ((), [], 0)
    with pytest.raises(InvalidArgument, match="table 0 is unknown; this shard has 0"):
        tables.check_ids([(0, ids_of(1))])
    parts = [Tables(plan, shard) for shard in range(2)]
    ids = np.arange(100)
    own = [ids[shard_of(ids, 2) == shard] for shard in range(2)]
    for mine, there in zip(parts, own, strict=True):
        mine.check_ids([(0, there)])


def test_a_table_without_memory_leaves_all_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = two()
    tables.apply({0: gradients([1]), 1: gradients([1], 2)}, 1.0, 0, 1)
    before = tables.freeze()

    def refuse(nbytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    # More than fits into the room that there is from the beginning.
    many = np.arange(10_000)
    monkeypatch.setattr(tables[1]._store.values, "_resize", refuse)
    with pytest.raises(ResourceExhausted, match="'users': no memory for 9999 rows beside 1"):
        tables.apply({0: gradients(many), 1: gradients(many, 2)}, 1.0, 1, 2)
    for now, then in zip(tables.freeze().tables, before.tables, strict=True):
        assert (len(now), now.version) == (1, 1)
        ours, theirs = now.block(now.since(-1)), then.block(then.since(-1))
        np.testing.assert_array_equal(ours.values, theirs.values)
        assert (ours.counts.tolist(), ours.touched.tolist()) == ([1], [1])
    monkeypatch.undo()
    tables.apply({0: gradients(many), 1: gradients(many, 2)}, 1.0, 1, 2)
    assert [len(table) for table in tables.tables] == [10_000, 10_000]


def test_no_tables() -> None:
    tables = Tables(make_plan([DENSE], 1, "cut"), 0)
    tables.check({})
    tables.apply({}, 1.0, 0, 1)
    tables.read([], [])
    tables.forget()
    frozen = tables.freeze()
    assert frozen.tables == ()
    frozen.close()
    assert tables.figures() == []
