"""Places of shards: one process in each, and the words for those that are missing."""

from __future__ import annotations

import pytest

from coordinator.membership.shard_places import STARTING_S, ShardPlaces
from psrpc.core.errors import AlreadyExists, InvalidArgument, StaleGeneration
from psrpc.core.shard_reports import ShardFigures


def add(places: ShardPlaces, index: int, incarnation: int, now: float = 0.0) -> bool:
    return places.register(index, incarnation, f"host:{index}", "host", 42, now)


def states(places: ShardPlaces) -> list[str]:
    return [shard.state for shard in places.shards]


@pytest.mark.parametrize(("shards", "hint"), [(1, "so --shard is 0;"), (3, "0 to 2")])
def test_an_index_out_of_range_names_the_range(shards: int, hint: str) -> None:
    with pytest.raises(InvalidArgument, match=hint):
        add(ShardPlaces(shards), shards, 1)


def test_a_place_is_held_by_one_process() -> None:
    places = ShardPlaces(2)
    add(places, 0, 11)
    add(places, 0, 11)
    with pytest.raises(AlreadyExists, match=r"shard 0 at host:0 \(pid 42 on host\)"):
        add(places, 0, 12)
    assert places.shards[0].incarnation == 11


def test_a_place_is_free_once_its_command_stream_has_ended() -> None:
    places = ShardPlaces(2)
    add(places, 0, 11)
    places.watches(0, 11, 0.0)
    with pytest.raises(AlreadyExists):
        add(places, 0, 12)
    places.stopped_watching(0, 11)
    assert add(places, 0, 12, 1.0)
    assert states(places) == ["starting", "missing"]
    with pytest.raises(StaleGeneration, match="held by another process"):
        places.beat(0, 11, ShardFigures(), 1.0)
    with pytest.raises(StaleGeneration, match="taken over by another process"):
        add(places, 0, 11, 1.0)
    places.stopped_watching(0, 11)
    assert places.shards[0].incarnation == 12


def test_the_place_of_a_shard_that_never_watched_is_free_earlier() -> None:
    places = ShardPlaces(2)
    add(places, 0, 11)
    with pytest.raises(AlreadyExists):
        add(places, 0, 12, STARTING_S)
    assert add(places, 0, 12, STARTING_S + 0.1)


def test_a_restarted_coordinator_knows_replaced_shards_and_those_to_ask_again() -> None:
    places = ShardPlaces(2, former={0: [11, 12]})
    assert not places.knows(0, 13)
    assert places.knows(0, 11)
    assert places.knows(7, 1)
    for old in (11, 12):
        with pytest.raises(StaleGeneration, match="taken over"):
            add(places, 0, old)
    with pytest.raises(StaleGeneration, match="held by another process"):
        places.beat(0, 11, ShardFigures(), 0.0)
    assert add(places, 0, 13)
    assert not add(places, 0, 13)
    assert places.knows(0, 14)


def test_reports_of_a_restoring_shard_are_not_compared() -> None:
    places = ShardPlaces(1)
    add(places, 0, 11)
    told = []
    for now, version in enumerate((0, 0, 500, 510, 520)):
        if now == 1:
            # It was told before that, and comes after it.
            places.ready(0, 11, version=500, now=1.0)
        places.beat(0, 11, ShardFigures(version=version, generation=2), float(now))
        earlier = places.shards[0].earlier
        told.append(earlier and earlier[1].version)
    assert told == [None, None, None, 500, 510]


def test_missing_shards_are_named() -> None:
    places = ShardPlaces(3)
    add(places, 1, 1)
    assert places.waiting_for() == "shards 0, 2 to register; shard 1 at host:1 to start"
    places.watches(1, 1, 0.0)
    assert places.waiting_for() == "shards 0, 2 to register"
    places.ready(1, 1, version=0, now=0.0)
    places.stopped_watching(1, 1)
    assert places.waiting_for().endswith("shard 1 at host:1 to come back")
    assert places.present(STARTING_S) == 1
    assert places.present(STARTING_S + 0.1) == 0
