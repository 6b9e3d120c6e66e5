"""Membership: one process per place, silence, and a coordinator that stood still itself."""

from __future__ import annotations

import pytest

from coordinator.membership import Membership, ShardFigures, ShardSilent, WorkerSilent
from psrpc.errors import AlreadyExists, InvalidArgument, StaleGeneration


def make(shards: int = 2) -> Membership:
    return Membership(shards, lease_s=10.0)


def add(members: Membership, index: int, incarnation: int, now: float = 0.0) -> None:
    members.register_shard(index, incarnation, f"host:{index}", "host", 42, now)


def states(members: Membership) -> list[str]:
    return [shard.state for shard in members.shards]


def ticks(members: Membership, start: float, stop: float) -> list[object]:
    effects: list[object] = []
    now = start
    while now <= stop:
        effects += members.tick(now)
        now += 0.5
    return effects


@pytest.mark.parametrize(("shards", "hint"), [(1, "so --shard is 0;"), (3, "0 to 2")])
def test_an_index_out_of_range_names_the_range(shards: int, hint: str) -> None:
    with pytest.raises(InvalidArgument, match=hint):
        add(make(shards), shards, 1)


def test_a_place_is_held_by_one_process() -> None:
    members = make()
    add(members, 0, 11)
    add(members, 0, 11)
    with pytest.raises(AlreadyExists, match=r"shard 0 at host:0 \(pid 42 on host\)"):
        add(members, 0, 12)
    assert members.shards[0].incarnation == 11


def test_a_place_is_free_again_when_its_holder_fell_silent_without_parameters() -> None:
    members = make()
    add(members, 0, 11)
    ticks(members, 0, 11)
    assert states(members) == ["silent", "missing"]
    add(members, 0, 12, 11.0)
    assert states(members) == ["starting", "missing"]
    with pytest.raises(StaleGeneration, match="held by another process"):
        members.shard_beat(0, 11, ShardFigures(), 12.0)


def test_the_place_of_a_silent_shard_with_parameters_is_not_given_away() -> None:
    members = make()
    add(members, 0, 11)
    members.shard_ready(0, 11, initialized=True, now=0.0)
    ticks(members, 0, 11)
    with pytest.raises(AlreadyExists, match=r"held parameters .*--resume"):
        add(members, 0, 12, 11.0)


def test_silence_is_said_once_and_forgiven() -> None:
    members = make(1)
    add(members, 0, 11)
    members.shard_ready(0, 11, initialized=False, now=0.0)
    worker = members.register_worker(5, "host", 1, "cpu", 0.0)
    effects = ticks(members, 0, 12)
    assert effects == [
        ShardSilent(0, "shard 0 at host:0 has been silent for 10 s"),
        WorkerSilent("worker-0", "worker-0 has been silent for 10 s"),
    ]
    assert members.waiting_for_shards(12.0) == "shard 0 at host:0 has been silent for 12 s"
    assert members.active_workers == 0
    members.shard_beat(0, 11, ShardFigures(version=3), 12.5)
    assert members.shards[0].state == "ready"
    assert not members.worker_seen("worker-0", 5, 12.5)
    assert worker.state == "active"
    assert members.worker_seen("worker-0", 5, 12.5)


def test_a_late_tick_renews_every_lease_before_it_judges() -> None:
    members = make(1)
    add(members, 0, 11)
    members.register_worker(5, "host", 1, "cpu", 0.0)
    assert members.tick(0.5) == []
    assert members.tick(60.0) == []
    assert members.shards[0].state == "starting"
    assert len(ticks(members, 60.5, 71.0)) == 2


def test_workers_get_rising_ids_and_keep_them() -> None:
    members = make()
    assert [members.register_worker(n, "h", n, "cpu", 0.0).name for n in (7, 8, 7)] == [
        "worker-0",
        "worker-1",
        "worker-0",
    ]
    assert members.leave_worker("worker-0", 7)
    assert not members.leave_worker("worker-0", 7)
    assert members.register_worker(7, "h", 7, "cpu", 0.0).name == "worker-2"
    with pytest.raises(StaleGeneration, match="worker-0 is not registered"):
        members.worker("worker-0", 7, 0.0)
    with pytest.raises(StaleGeneration, match="worker-1 is not registered"):
        members.worker("worker-1", 999, 0.0)


def test_what_is_missing_is_named() -> None:
    members = make(3)
    add(members, 1, 1)
    assert members.waiting_for_shards(0.0) == "shards 0, 2 to register; shard 1 at host:1 to start"
    assert not members.shards_ready
