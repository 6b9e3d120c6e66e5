"""Membership: silence, a coordinator that stood still itself, and one that has restarted."""

from __future__ import annotations

import pytest

from coordinator.client.client import HEARTBEAT_CALL_S
from coordinator.membership import membership
from coordinator.membership.members import ShardSilent, WorkerSilent
from coordinator.membership.membership import (
    CALMEST,
    CROWD,
    KEPT_WORKERS,
    Membership,
    known_members,
)
from coordinator.membership.shard_places import ShardPlaces
from coordinator.rpc.messages import HEARTBEAT_S
from psrpc.core.errors import ResourceExhausted, StaleGeneration
from psrpc.core.shard_reports import ShardFigures


def make(shards: int = 2) -> Membership:
    return Membership(ShardPlaces(shards), lease_s=10.0)


def add(members: Membership, index: int, incarnation: int, now: float = 0.0) -> bool:
    return members.places.register(index, incarnation, f"host:{index}", "host", 42, now)


def states(members: Membership) -> list[str]:
    return [shard.state for shard in members.places.shards]


def ticks(members: Membership, start: float, stop: float) -> list[object]:
    effects: list[object] = []
    now = start
    while now <= stop:
        effects += members.tick(now)
        now += 0.5
    return effects


def test_a_place_is_free_once_its_lease_has_lapsed() -> None:
    members = make()
    add(members, 0, 11)
    members.places.watches(0, 11, 0.0)
    ticks(members, 0, 11)
    assert states(members) == ["silent", "missing"]
    assert add(members, 0, 12, 11.0)


def test_the_first_to_register_at_a_restarted_coordinator_keeps_the_place() -> None:
    members = known_members(1, 10.0, [("0", 11), ("0", 12)], [])
    assert add(members, 0, 13)
    members.places.watches(0, 13, 0.0)
    members.places.stopped_watching(0, 13)
    for old in (11, 12):
        with pytest.raises(StaleGeneration, match="taken over"):
            add(members, 0, old)
    members = known_members(1, 10.0, [("0", 11), ("0", 12)], [])
    assert add(members, 0, 12)


def test_a_restarted_coordinator_gives_workers_their_names_again() -> None:
    members = Membership(ShardPlaces(1), 10.0, names={5: "worker-0", 6: "worker-7"})
    assert members.register_worker(6, "h", 1, "cpu", 0.0).name == "worker-7"
    assert members.register_worker(9, "h", 1, "cpu", 0.0).name == "worker-8"
    assert members.register_worker(5, "h", 1, "cpu", 0.0).name == "worker-0"


def test_workers_that_are_gone_are_forgotten_in_the_end() -> None:
    members = make()
    for incarnation in range(1, KEPT_WORKERS + 50):
        name = members.register_worker(incarnation, "h", 1, "cpu", 0.0).name
        members.leave_worker(name)
    members.register_worker(10**6, "h", 1, "cpu", 0.0)
    assert len(members.workers) == KEPT_WORKERS + 1
    assert members.active_workers == 1


def test_silence_is_said_once_and_forgiven_to_shards_alone() -> None:
    members = make(1)
    add(members, 0, 11)
    members.places.watches(0, 11, 0.0)
    members.places.ready(0, 11, version=0, now=0.0)
    worker = members.register_worker(5, "host", 1, "cpu", 0.0)
    effects = ticks(members, 0, 12)
    assert effects == [
        ShardSilent(0, "shard 0 at host:0 has been silent for 10 s"),
        WorkerSilent("worker-0", "worker-0 has been silent for 10 s"),
    ]
    assert members.places.waiting_for() == "a sign of life of shard 0 at host:0"
    assert members.active_workers == 0
    members.places.beat(0, 11, ShardFigures(version=3), 12.5)
    assert members.places.shards[0].state == "ready"
    assert not members.worker_seen("worker-0", 12.5)
    assert worker.state == "silent"
    with pytest.raises(StaleGeneration, match="taken for gone"):
        members.worker("worker-0")
    assert members.register_worker(5, "host", 1, "cpu", 12.5).name == "worker-1"


def test_a_late_tick_renews_every_lease_before_it_judges() -> None:
    members = make(1)
    add(members, 0, 11)
    members.register_worker(5, "host", 1, "cpu", 0.0)
    assert members.tick(0.5) == []
    assert members.tick(60.0) == []
    assert members.places.shards[0].state == "starting"
    assert len(ticks(members, 60.5, 71.0)) == 2


def test_workers_get_rising_ids_and_keep_them() -> None:
    members = make()
    assert [members.register_worker(n, "h", n, "cpu", 0.0).name for n in (7, 8, 7)] == [
        "worker-0",
        "worker-1",
        "worker-0",
    ]
    assert members.leave_worker("worker-0")
    assert not members.leave_worker("worker-0")
    assert members.register_worker(7, "h", 7, "cpu", 0.0).name == "worker-2"
    with pytest.raises(StaleGeneration, match="worker-0 is not registered"):
        members.worker("worker-0")
    with pytest.raises(StaleGeneration, match="worker-9 is not registered"):
        members.worker("worker-9")


def test_there_are_only_so_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_ACTIVE", 2)
    members = make()
    for n in (7, 8, 7):
        members.register_worker(n, "h", n, "cpu", 0.0)
    with pytest.raises(ResourceExhausted, match="2 workers, as many as it can have"):
        members.register_worker(9, "h", 9, "cpu", 0.0)
    assert set(members.workers) == {"worker-0", "worker-1"}
    members.leave_worker("worker-0")
    assert members.register_worker(9, "h", 9, "cpu", 0.0).name == "worker-2"


def test_workers_of_a_crowd_send_heartbeats_less_often_and_are_waited_for_longer() -> None:
    members = make()
    crowd = [members.register_worker(n, "h", n, "cpu", 0.0) for n in range(1, 3 * CROWD + 1)]
    calm = [worker.calm for worker in crowd]
    assert calm[:CROWD] == [1.0] * CROWD
    assert calm == sorted(calm)
    assert calm[-1] == 2.0
    members.tick(9.5)
    assert members.tick(10.5) == [
        WorkerSilent(worker.name, f"{worker.name} has been silent for 10 s")
        for worker in crowd
        if members.allowed_s(worker) < 10.5
    ]
    members.tick(13.5)
    assert members.active_workers == 0


@pytest.mark.parametrize("calm", [1.0, 1.5, CALMEST])
def test_two_lost_heartbeats_and_the_wait_for_a_third_fit_into_any_lease(calm: float) -> None:
    members = make()
    worker = members.register_worker(1, "h", 1, "cpu", 0.0)
    worker.calm = calm
    pause_s = HEARTBEAT_S * calm
    assert 2 * (pause_s + HEARTBEAT_CALL_S) + pause_s < members.allowed_s(worker)


def test_workers_that_come_and_go_are_counted() -> None:
    members = make()
    for incarnation in (5, 6, 6):
        members.register_worker(incarnation, "host", 1, "cpu", 0.0)
    assert (members.joined_workers, members.active_workers) == (2, 2)
    assert members.leave_worker("worker-0")
    ticks(members, 0, 12)
    members.register_worker(6, "host", 1, "cpu", 13.0)
    assert (members.joined_workers, members.active_workers) == (3, 1)
