"""A table against a dict, over random sequences of what is done with one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pserver.tables import admission
from pserver.tables.frozen import FrozenTable
from pserver.tables.part import TablePart
from pserver.tables.table import Table
from psrpc.core.tables import Rows, TableSpec
from tests.pserver.tables.table_cases import Model, ids_of, marks_of, spec

WIDTH = 3
ALL = ids_of(-(2**63), *range(-5, 40), 2**63 - 1)
CANDIDATES = 12

KINDS: Mapping[str, Mapping[str, Any]] = {
    "unlimited": {},
    "counted": {"min_count": 3},
    "by age": {"max_rows": 16, "eviction": "age"},
    "by frequency": {"max_rows": 16, "eviction": "frequency"},
    "counted, by age": {"min_count": 2, "max_rows": 16, "eviction": "age"},
}

apply = st.tuples(st.just("apply"), st.sets(st.integers(0, len(ALL) - 1), max_size=16))
steps = st.lists(
    st.one_of(
        apply,
        apply,
        apply,
        st.just(("freeze",)),
        st.tuples(st.just("close"), st.integers(0, 3)),
        st.just(("restore",)),
        st.just(("forget",)),
    ),
    max_size=40,
)


def check_part(part: TablePart, model: Model) -> None:
    for k, i in enumerate(part.ids.tolist()):
        row = model.rows[i]
        np.testing.assert_array_equal(part.values[k], row.value)
        np.testing.assert_array_equal(part.slots["momentums"][k], row.velocity)
        assert (part.counts[k], part.touched[k]) == (row.count, row.touched)


def check_frozen(frozen: FrozenTable, model: Model, since: int) -> None:
    assert len(frozen) == len(model.rows)
    into = np.empty((len(ALL), WIDTH), np.float32)
    frozen.read(ALL, into)
    np.testing.assert_array_equal(into, [model.read(int(i)) for i in ALL])
    assert set(ALL[frozen.present(ALL)].tolist()) == set(model.rows)
    for version in (-1, since):
        slots = frozen.since(version)
        part = frozen.block(slots)
        expected = {i for i, row in model.rows.items() if row.touched > version}
        assert len(slots) == len(expected)
        assert set(part.ids.tolist()) == expected
        check_part(part, model)
        halves = [frozen.since(version, 0, 7), frozen.since(version, 7, None)]
        np.testing.assert_array_equal(np.concatenate(halves), slots)
    removed = {i for at, i in model.removed if at > since} - set(model.rows)
    found = frozen.removed_since(since)
    assert found is not None
    assert found.tolist() == sorted(removed)
    assert marks_of(frozen.candidates) == model.candidates


def restored(table: Table, spec: TableSpec) -> Table:
    """Through parts of a few rows, as a checkpoint has them."""
    frozen = table.freeze()
    other = Table(spec, 0, 1)
    other.apply(Rows(ids_of(), np.empty((0, WIDTH), np.float32)), 1.0, 0, 0)
    slots = frozen.since(-1)
    for start in range(0, len(slots), 5):
        other.insert(frozen.block(slots[start : start + 5]))
    other.load_candidates(frozen.candidates)
    frozen.close()
    return other


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, derandomize=True)
@given(steps=steps)
def test_a_table_is_a_dict_of_rows(kind: str, steps: list[tuple[Any, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "MAX_CANDIDATES", CANDIDATES)
        check(spec(optimizer=Model.OPTIMIZER, **KINDS[kind]), steps)


def check(its: TableSpec, steps: list[tuple[Any, ...]]) -> None:
    table, model = Table(its, 0, 1), Model(its, CANDIDATES)
    table.apply(Rows(ids_of(), np.empty((0, WIDTH), np.float32)), 1.0, 0, 0)
    opened: list[tuple[FrozenTable, Model, int]] = []
    for version, step in enumerate(steps, 1):
        match step:
            case ("apply", chosen):
                ids = ALL[sorted(chosen)]
                values = np.random.default_rng(version).normal(size=(len(ids), WIDTH))
                rows = Rows(ids, values.astype(np.float32))
                table.check(rows)
                table.apply(rows, 0.5, version - 1, version)
                model.apply(rows, 0.5, version)
            case ("freeze",) if len(opened) < 4:
                opened.append((table.freeze(), model.copy(), version // 2))
            case ("close", number) if number < len(opened):
                frozen, before, since = opened.pop(number)
                check_frozen(frozen, before, since)
                frozen.close()
            case ("restore",):
                table = restored(table, its)
                model.removed.clear()
            case ("forget",):
                table.forget()
                table.apply(Rows(ids_of(), np.empty((0, WIDTH), np.float32)), 1.0, 0, 0)
                model = Model(its, CANDIDATES)
        assert len(table) == len(model.rows)
    for frozen, before, since in opened:
        check_frozen(frozen, before, since)
        frozen.close()
    last = table.freeze()
    check_frozen(last, model, len(steps) // 2)
    into = np.empty((len(ALL), WIDTH), np.float32)
    table.read(ALL, into)
    np.testing.assert_array_equal(into, [model.read(int(i)) for i in ALL])
    last.close()
