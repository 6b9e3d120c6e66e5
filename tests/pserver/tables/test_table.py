"""Refusals, eviction and restore of one table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pserver.tables import row_store as evicted
from pserver.tables.table import Table
from psrpc.core.errors import CheckpointError, InvalidArgument, ResourceExhausted
from psrpc.core.tables import Ids, Rows, shard_of
from tests.pserver.tables.table_cases import apply, content, gradients, ids_of, optimizer, spec


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (ids_of(1, 5, 5), "'items': id 5 follows id 5"),
        (ids_of(5, 1), "'items': id 1 follows id 5"),
        (ids_of(-3, 1), "'items': id -3 is outside the vocabulary, 0 to 99"),
        (ids_of(1, 100, 2000), "'items': id 100 is outside the vocabulary"),
        (ids_of(1, 2).astype(np.int32), r"'items' got ids int32\[2\]"),
    ],
)
def test_ids_that_cannot_be(ids: Ids, message: str) -> None:
    table = Table(spec(vocabulary=100), 0, 1)
    with pytest.raises(InvalidArgument, match=message):
        table.check_ids(ids)


def test_an_id_of_another_shard() -> None:
    ids = np.arange(100)
    own = ids[shard_of(ids, 3) == 1]
    table = Table(spec(), 1, 3)
    table.check_ids(own)
    (other,) = ids[shard_of(ids, 3) == 2][:1]
    with pytest.raises(InvalidArgument, match=f"id {other} is of shard 2; this is shard 1"):
        table.check_ids(np.union1d(own, other))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_no_number(bad: float) -> None:
    table = Table(spec(), 0, 1)
    apply(table, 1, 2, 3)
    before = content(table)
    rows = gradients(range(50_000))
    rows.values[40_007, 1] = bad
    with pytest.raises(InvalidArgument, match=rf"'items': the gradient of id 40007 is {bad} in"):
        table.check(rows)
    assert content(table) == before


def test_gradients_of_another_shape() -> None:
    with pytest.raises(InvalidArgument, match=r"float32\[2, 4\]; expected float32\[2, 3\]"):
        Table(spec(), 0, 1).check(gradients([1, 2], width=4))


def test_memory_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(spec(), 0, 1)
    apply(table, 1)
    before = content(table)

    def refuse(ids: Ids) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(table._store, "reserve", refuse)
    with pytest.raises(ResourceExhausted, match="'items': no memory for 2 rows"):
        table.apply(gradients([1, 2, 3]), 1.0, 1, 2)
    assert content(table) == before


@pytest.mark.parametrize(("eviction", "gone"), [("age", {1, 2}), ("frequency", {3, 4})])
def test_rows_evicted_at_the_bound(eviction: str, gone: set[int]) -> None:
    table = Table(spec(max_rows=5, eviction=eviction, keep_evicted=True), 0, 1)
    for version in (1, 2):
        apply(table, 1, 2, version=version)
    apply(table, 3, 4, 5, version=3)
    apply(table, 5, version=4)
    before = content(table)
    apply(table, 8, 9, version=5)
    part = table.freeze().evicted(-1)
    assert set(part.ids.tolist()) == gone
    for k, i in enumerate(part.ids.tolist()):
        assert [part.values[k].tolist(), part.counts[k], part.touched[k]] == before[i]
    assert (len(table), table.evicted, table.created) == (5, 2, 7)


def test_a_row_of_the_update_itself_does_not_make_room() -> None:
    table = Table(spec(max_rows=3, eviction="frequency"), 0, 1)
    for version in range(1, 6):
        apply(table, 1, 2, version=version)
    apply(table, 3, version=6)
    apply(table, 3, 4, version=7)
    assert table.present(ids_of(3, 4)).all()


def test_rows_are_evicted_a_sixteenth_at_a_time_and_their_slots_used_again() -> None:
    table = Table(spec(max_rows=1600, eviction="age"), 0, 1)
    apply(table, *range(1600))
    nbytes = table.nbytes
    for version in range(2, 20):
        new = range(1600 + 90 * version, 1690 + 90 * version)
        apply(table, *new, version=version)
        assert 1500 <= len(table) <= 1600
        assert table.present(np.array(new)).all()
    assert table.evicted % 100 == 0
    # The ids that were removed are remembered too.
    assert table.nbytes <= nbytes + 8 * table.evicted + 8 * 100


def test_evicted_rows_are_kept_until_a_checkpoint_has_them() -> None:
    table = Table(spec(max_rows=1, eviction="age", keep_evicted=True), 0, 1)
    apply(table, 1, version=1)
    first = content(table)[1]
    apply(table, 2, version=2)
    early = table.freeze()
    for version, i in enumerate((1, 3, 4), 3):
        apply(table, i, version=version)
    table.let_go_evicted(2)
    late = table.freeze()
    assert (early.version, late.version) == (2, 5)
    # As of its moment: it has the row of id 1 that was evicted then, not the later one.
    part = early.evicted(-1)
    assert [part.ids.tolist(), part.values[0].tolist()] == [[1], first[0]]
    assert len(early.evicted(2)) == 0
    assert late.evicted(-1).ids.tolist() == [1, 2, 3]
    assert late.evicted(4).ids.tolist() == [3]
    assert late.evicted(-1).values[0].tolist() != first[0]
    table.forget()
    assert len(table.freeze().evicted(-1)) == 0
    assert late.evicted(3).ids.tolist() == [1, 3]


def test_of_an_id_that_was_evicted_twice_the_last_row_counts() -> None:
    table = Table(spec(max_rows=1, eviction="age", keep_evicted=True), 0, 1)
    for version, i in enumerate((7, 5, 7, 5), 1):
        apply(table, i, version=version)
    part = table.freeze().evicted(-1)
    assert part.ids.tolist() == [5, 7]
    assert part.touched.tolist() == [2, 3]


def test_evicted_rows_are_bounded_and_those_that_had_to_go_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evicted, "MAX_NBYTES", 28 * 10)
    table = Table(spec(max_rows=1, eviction="age", keep_evicted=True), 0, 1)
    for version in range(1, 31):
        apply(table, version, version=version)
    assert table.freeze().evicted(-1).ids.tolist() == list(range(20, 30))
    assert table.evicted_dropped == 19


def test_more_rows_evicted_at_once_than_may_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicted, "MAX_NBYTES", 28 * 10)
    table = Table(spec(max_rows=16, eviction="age", keep_evicted=True), 0, 1)
    apply(table, *range(16), version=1)
    apply(table, *range(16, 30), version=2)
    assert (len(table.freeze().evicted(-1)), table.evicted_dropped) == (10, 4)


def test_evicted_rows_are_kept_only_where_that_was_asked_for() -> None:
    table = Table(spec(max_rows=1, eviction="age"), 0, 1)
    apply(table, 1, version=1)
    apply(table, 2, version=2)
    assert (table.evicted, table.evicted_dropped) == (1, 0)
    assert len(table.freeze().evicted(-1)) == 0


def test_shards_hold_together_what_one_would() -> None:
    """Every row has the same bits, whatever the number of shards."""

    def trained(shards: int) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        for shard in range(shards):
            table = Table(spec(optimizer=optimizer("Adam"), min_count=2), shard, shards)
            for version in range(1, 6):
                rows = gradients(range(0, 600, version), seed=version)
                own = shard_of(rows.ids, shards) == shard
                table.check(Rows(rows.ids[own], rows.values[own]))
                table.apply(Rows(rows.ids[own], rows.values[own]), 1.0, version - 1, version)
            found = content(table)
            counted = merged.get("candidates", {}) | found["candidates"]
            merged |= found | {"candidates": counted}
        return merged

    whole = trained(1)
    assert trained(3) == whole
    assert len(whole) > 300


def test_restored_rows_go_on_alike() -> None:
    its = spec(optimizer=optimizer("Adam"), min_count=2)
    table, other = Table(its, 0, 1), Table(its, 0, 1)
    for version in (1, 2, 3):
        apply(table, *range(0, 60, version), version=version)
    frozen = table.freeze()
    apply(other, 1, 2, 7)
    other.forget()
    assert content(other) == {"candidates": {}}
    part = frozen.block(frozen.since(-1)[::-1])
    other.insert(part)
    other.insert(part)
    other.load_candidates(frozen.candidates)
    assert content(other) == content(table)
    for which in (table, other):
        apply(which, *range(70), version=4)
    assert content(other) == content(table)
    assert other.created == 60 - len(part)


def test_a_later_part_overwrites_and_removes() -> None:
    table, other = Table(spec(), 0, 1), Table(spec(), 0, 1)
    apply(table, 1, 2, 3)
    frozen = table.freeze()
    other.insert(frozen.block(frozen.since(-1)))
    apply(table, 2, version=2)
    later = table.freeze()
    other.insert(later.block(later.since(1)))
    assert content(other) == content(table)
    other.remove(ids_of(1, 3, 99))
    assert set(content(other)) == {2, "candidates"}


def test_a_part_of_another_optimizer_or_width() -> None:
    adam = Table(spec(optimizer=optimizer("Adam")), 0, 1)
    apply(adam, 1)
    frozen = adam.freeze()
    part = frozen.block(frozen.since(-1))
    for its, message in (
        (spec(), "'items' has (momentums|velocities) float32.*expected none"),
        (spec(width=4, optimizer=optimizer("Adam")), r"float32\[1, 3\].*float32\[1, 4\]"),
    ):
        table = Table(its, 0, 1)
        with pytest.raises(CheckpointError, match=message):
            table.insert(part)
        assert len(table) == 0


def test_a_count_does_not_wrap() -> None:
    table = Table(spec(), 0, 1)
    apply(table, 1)
    frozen = table.freeze()
    part = frozen.block(frozen.since(-1))
    frozen.close()
    part.counts[:], part.touched[:] = 2**32 - 3, 2**32 - 1
    table.insert(part)
    for version in (2**33, 2**33 + 1):
        apply(table, 1, version=version)
    assert content(table)[1][-2:] == [2**32 - 2, 2**32 - 2]
