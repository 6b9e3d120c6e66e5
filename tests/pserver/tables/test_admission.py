"""Admission of ids into a table: the candidates, and the limit of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pserver.tables import admission
from pserver.tables.candidates import Candidates
from pserver.tables.part import Counted
from pserver.tables.table import Table
from psrpc.core.errors import ResourceExhausted
from psrpc.core.tables import Ids, Rows, shard_of
from tests.pserver.tables.table_cases import (
    apply,
    content,
    gradients,
    ids_of,
    marks_of,
    optimizer,
    spec,
)


def test_the_push_that_admits_is_applied_alone() -> None:
    table, plain = Table(spec(min_count=3), 0, 1), Table(spec(), 0, 1)
    for version in (1, 2, 3):
        apply(table, 5, version=version)
        assert len(table) == (version == 3)
    apply(plain, 5, version=3)
    (value, *_), (expected, *_) = content(table)[5], content(plain)[5]
    assert value == expected
    assert table.admission.candidates()[0].tolist() == []
    assert (table.created, plain.created) == (1, 1)


@pytest.mark.parametrize(
    "its",
    [optimizer(momentum=0.5), optimizer("Adagrad"), optimizer("Adam")],
    ids=["momentum", "Adagrad", "Adam"],
)
def test_rows_are_updated_alike_beside_ids_that_are_only_counted(its: dict[str, Any]) -> None:
    table, plain = Table(spec(optimizer=its, min_count=2), 0, 1), Table(spec(optimizer=its), 0, 1)
    known, mixed = gradients([1, 2, 3]), gradients([0, 1, 2, 7], seed=1)
    table.apply(known, 1.0, 0, 1)
    for each in (table, plain):
        each.apply(known, 1.0, 1, 2)
    table.apply(mixed, 1.0, 2, 3)
    plain.apply(Rows(mixed.ids[1:3], mixed.values[1:3]), 1.0, 2, 3)
    found, expected = (each.freeze() for each in (table, plain))
    for column in ("values", *(f"slot/{name}" for name in found.block(found.since(2)).slots)):
        np.testing.assert_array_equal(
            found.column(column, found.since(-1)), expected.column(column, expected.since(-1))
        )


def test_a_frozen_table_has_the_candidates_of_its_moment() -> None:
    table = Table(spec(min_count=3), 0, 1)
    apply(table, 5, 6, version=1)
    apply(table, 6, version=2)
    frozen = table.freeze()
    apply(table, 5, 6, 7, version=3)
    assert marks_of(frozen.candidates) == {5: (1, 1), 6: (2, 2)}
    frozen.close()


def test_as_many_candidates_as_there_were_are_restored() -> None:
    """More than an empty table has room for."""
    its = spec(min_count=3)
    table, other = Table(its, 0, 1), Table(its, 0, 1)
    apply(table, *range(5000), version=1)
    apply(table, *range(1000), version=2)
    other.load_candidates(table.admission.candidates())
    assert content(other) == content(table)
    assert len(other.admission.candidates()[0]) == 5000
    apply(other, *range(2000), version=3)
    assert len(other) == 1000


def test_memory_for_candidates_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(spec(min_count=3), 0, 1)

    def refuse(ids: Ids) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(table.admission._candidates._store, "reserve", refuse)
    with pytest.raises(ResourceExhausted, match="'items': no memory for 2 ids that are counted"):
        table.load_candidates(Counted(ids_of(1, 2), np.ones(2, np.uint32), np.ones(2, np.uint32)))
    assert content(table) == {"candidates": {}}


def test_candidates_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_CANDIDATES", 64)
    table = Table(spec(min_count=4), 0, 1)
    apply(table, *range(20), version=1)
    apply(table, *range(20), version=2)
    for version in range(3, 30):
        apply(table, *range(100 * version, 100 * version + 30), version=version)
        assert len(table.admission.candidates()[0]) <= 64
    kept = marks_of(table.admission.candidates())
    assert [kept[i] for i in range(20)] == [(2, 2)] * 20, "those with the greatest count stay"
    assert len(table) == 0
    dropped = 20 + 27 * 30 - len(kept)
    assert table.admission.dropped == dropped
    table.forget()
    assert table.admission.candidates()[0].tolist() == []
    apply(table, *range(80), version=1)
    assert table.admission.dropped == dropped + 80 - len(table.admission.candidates()[0]), (
        "it never falls"
    )


def test_a_restored_table_forgets_the_candidates_that_it_would_have_forgotten() -> None:
    its = spec(min_count=2, max_rows=4, eviction="age")
    table, other = Table(its, 0, 1), Table(its, 0, 1)
    for version in range(1, 17):
        apply(table, version, version=version)
    other.load_candidates(table.admission.candidates())
    assert other.version == 16, "versions go on from here, whatever the shard's own becomes"
    for which in (table, other):
        apply(which, 100, version=17)
    assert content(other) == content(table)
    assert marks_of(table.admission.candidates()).keys() == {*range(3, 17), 100}


def test_candidates_of_a_checkpoint_without_versions_are_the_oldest() -> None:
    table = Table(spec(min_count=2, max_rows=1, eviction="age"), 0, 1)
    table.load_candidates(Counted(ids_of(1, 2), np.ones(2, np.uint32), np.zeros(2, np.uint32)))
    for version in range(1, 4):
        apply(table, 10 + version, version=version)
    assert {11, 12, 13} <= marks_of(table.admission.candidates()).keys()


def test_nothing_is_left_of_candidates_that_were_admitted() -> None:
    many = Candidates(1000)
    for version in (1, 2):
        many.count(np.arange(500), 2, version)
    assert len(many) == 0


@pytest.mark.parametrize("min_count", [1, 2])
def test_a_full_table_stays_as_it_is(min_count: int) -> None:
    table = Table(spec(max_rows=4, min_count=min_count), 0, 1)
    for version in range(1, min_count + 1):
        apply(table, 1, 2, 3, version=version)
    if min_count == 2:
        apply(table, 7, 8, version=3)
    before = content(table)
    rows = gradients([1, 7, 8])
    with pytest.raises(ResourceExhausted, match=r"'items' is full: .* 3 rows of at most 4 .*'age'"):
        table.check(rows)
    with pytest.raises(ResourceExhausted, match="full"):
        table.apply(rows, 1.0, 3, 4)
    assert content(table) == before
    apply(table, 1, 2, 3, 7, version=4)
    assert len(table) == 4


def test_an_update_of_more_rows_than_there_may_be() -> None:
    table = Table(spec(max_rows=6, eviction="age"), 0, 2)
    with pytest.raises(ResourceExhausted, match=r"at most 3 rows .* one update has 4; raise max"):
        table.check(gradients(np.arange(100)[shard_of(np.arange(100), 2) == 0][:4]))
