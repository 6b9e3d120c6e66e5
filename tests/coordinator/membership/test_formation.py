"""Formations: when a generation is due, what each shard was told, and when all have begun."""

from __future__ import annotations

from dataclasses import replace

from coordinator.membership.formation import Formation
from psrpc.core.commands import Begin
from psrpc.core.shard_reports import HeldState


def begins(generation: int, shards: int = 2) -> list[Begin]:
    return [Begin(generation, 1, keep=True)] * shards


def formed(shards: int = 2, generation: int = 1) -> Formation:
    formation = Formation(shards, generation - 1)
    for shard in range(shards):
        assert not is_due(formation)
        formation.stands(shard, HeldState(10 + shard))
    assert is_due(formation)
    formation.form(generation, begins(generation, shards))
    return formation


def is_complete(formation: Formation) -> bool:
    return formation.complete


def is_due(formation: Formation) -> bool:
    return formation.due


def begin(formation: Formation, shard: int, incarnation: int = 0) -> None:
    holding = HeldState(incarnation or 10 + shard, formation.generation, True, 5)
    formation.begun(shard, holding)


def complete(shards: int = 2, generation: int = 1) -> Formation:
    formation = formed(shards, generation)
    for shard in range(shards):
        begin(formation, shard)
    assert is_complete(formation)
    return formation


def test_a_generation_is_formed_of_all_and_complete_when_all_have_begun() -> None:
    formation = formed()
    assert not is_due(formation)
    assert not is_complete(formation)
    assert formation.told(0) == Begin(1, 1, keep=True)
    assert formation.waiting_for() == "shards 0, 1 to begin generation 1"
    begin(formation, 0)
    assert formation.told(0) is None
    assert formation.waiting_for() == "shard 1 to begin generation 1"
    assert not is_complete(formation)
    begin(formation, 1)
    assert is_complete(formation)
    assert formation.initialized
    assert formation.waiting_for() == ""


def test_a_shard_that_watches_again_changes_nothing_and_hears_what_it_missed() -> None:
    formation = formed()
    begin(formation, 0)
    formation.absent(1)
    formation.stands(1, HeldState(11))
    assert not is_due(formation)
    assert formation.told(1) == Begin(1, 1, keep=True)
    formation.absent(0)
    formation.stands(0, HeldState(10, 1, True, 6))
    assert formation.told(0) is None
    begin(formation, 1)
    assert is_complete(formation)


def test_a_shard_that_is_away_for_a_moment_leaves_the_generation_as_it_is() -> None:
    formation = complete()
    formation.absent(0)
    assert is_complete(formation)
    assert not is_due(formation)


def test_another_process_makes_another_generation_once_it_watches() -> None:
    formation = complete()
    formation.gone(1)
    assert not is_complete(formation)
    assert not is_due(formation)
    assert formation.told(1) is None
    formation.stands(1, HeldState(99))
    assert is_due(formation)
    assert formation.told(1) is None
    formation.form(2, begins(2))
    begin(formation, 0)
    begin(formation, 1, 99)
    assert is_complete(formation)


def test_workers_hear_of_the_next_generation_as_soon_as_the_present_one_is_over() -> None:
    formation = Formation(2, 4)
    assert formation.joinable == 5, "this one has no shards left"
    formation = formed(generation=5)
    assert formation.joinable == 5, "it is being begun"
    formation = complete(generation=5)
    formation.absent(0)
    assert formation.joinable == 5
    formation.gone(0)
    assert formation.joinable == 6
    formation.stands(0, HeldState(99))
    assert formation.joinable == 6
    formation.form(6, begins(6))
    assert formation.joinable == 6
    formation.dissolve()
    assert formation.joinable == 7


def test_nothing_is_formed_while_a_shard_is_away() -> None:
    formation = complete()
    formation.gone(1)
    formation.absent(0)
    formation.stands(1, HeldState(99))
    assert not is_due(formation)
    formation.stands(0, HeldState(10, 1, True, 7))
    assert is_due(formation)
    assert formation.holdings[0].version == 7


def test_two_replacements_while_a_generation_is_formed_make_two_more() -> None:
    formation = formed(3)
    begin(formation, 0)
    for generation, shard in ((2, 1), (3, 2)):
        formation.gone(shard)
        formation.stands(shard, HeldState(90 + shard))
        assert is_due(formation)
        formation.form(generation, begins(generation, 3))
        assert not is_complete(formation)
    for shard, incarnation in enumerate((10, 91, 92)):
        begin(formation, shard, incarnation)
    assert is_complete(formation)


def test_a_shard_that_cannot_begin_is_told_otherwise_and_counts_as_holding_nothing() -> None:
    formation = formed()
    begin(formation, 0)
    formation.stands(1, HeldState(11, 0, True, 5))
    formation.failed(1)
    assert is_due(formation)
    assert not is_complete(formation)
    assert [holding.initialized for holding in formation.holdings] == [True, False]
    begin(formation, 1)  # a late word of the generation that is over
    assert not is_complete(formation)
    formation.form(2, begins(2))
    assert formation.told(0) == Begin(2, 1, keep=True)


def test_a_worker_initializes_all() -> None:
    formation = formed()
    for shard in range(2):
        formation.begun(shard, HeldState(10 + shard, 1))
    assert [holding.initialized for holding in formation.holdings] == [False, False]
    formation.initialize()
    assert formation.initialized
    assert formation.holdings[1] == replace(HeldState(11, 1), initialized=True)


def test_a_restarted_coordinator_forms_a_generation_of_all_that_are_there() -> None:
    formation = Formation(2, generation=7)
    assert not is_complete(formation)
    assert formation.waiting_for() == ""
    formation.stands(0, HeldState(10, 7, True, 5))
    formation.stands(1, HeldState(11, 7, True, 5))
    assert is_due(formation)
