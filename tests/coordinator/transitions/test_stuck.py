"""Workers that cannot go on although they give signs of life: others do what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.core.figures import LEAST_S, Phase, Position, WorkerHeartbeat, stands_still
from coordinator.core.work import EvaluationWork, InitializationWork, Wait
from coordinator.membership.members import Shard as Place
from coordinator.membership.members import Worker as Member
from coordinator.rpc.status import write_status
from coordinator.transitions.stuck import GRACE_S, read_routes
from psrpc.core.errors import StaleGeneration
from tests.coordinator.sync_job import SYNC
from tests.coordinator.whole_coordinator import Coordinator, Worker, start

TWO_MINUTES = 120.0

SIGN_S = 4.0
"""Between signs of life: less than half a lease."""


def beat(
    worker: Worker, *unreachable: int, for_s: float = 0.0, at: tuple[Phase, int, float] = ("", 0, 0)
) -> bool:
    """A sign of life; whether the worker has to register again."""
    phase, count, median_s = at
    unknown, _ = worker.coordinator.engine.heartbeat_worker(
        worker.name,
        WorkerHeartbeat(
            worker.generation,
            unreachable=dict.fromkeys(unreachable, for_s),
            position=Position(phase, count, median_s),
        ),
    )
    return unknown


def alive(coordinator: Coordinator, *workers: Worker, **said: Any) -> None:
    """Some seconds pass, in which everyone gives signs of life."""
    coordinator.clock.advance(SIGN_S)
    for shard in coordinator.shards:
        shard.beat()
    for worker in workers:
        beat(worker, **said)
    coordinator.job_run.tick()


def lasts(coordinator: Coordinator) -> None:
    """Lets the grace period pass."""
    coordinator.clock.advance(GRACE_S)
    coordinator.job_run.tick()


def stuck(coordinator: Coordinator) -> list[str]:
    return list(write_status(coordinator.job_run).stuck)


# -- broken routes -----------------------------------------------------------------------------


def test_a_round_goes_on_without_a_worker_that_cannot_reach_a_shard(tmp_path: Path) -> None:
    coordinator, cut_off = start(tmp_path, **SYNC)
    other = Worker(coordinator, 2)
    held, own = cut_off.round(), other.round()
    assert isinstance(other.commit(own), Wait), "without speculation"
    beat(cut_off, 1)
    second = other.round()
    assert second.attempt.batch == held.attempt.batch
    assert second.attempt.number != held.attempt.number
    # Neither worker was refused: the first to commit counts.
    cut_off.commit(held)
    other.commit(second)
    coordinator.settle()
    assert coordinator.job_run.training.tally.superseded == 1
    assert coordinator.job_run.standing == (1, 1)


def test_the_work_of_a_worker_that_is_cut_off_is_refused_before_another_gets_it(
    tmp_path: Path,
) -> None:
    """Some shards may have applied its batch, and the rest may get it from another."""
    coordinator, cut_off = start(tmp_path)
    other = Worker(coordinator, 2)
    [held] = cut_off.batches()
    beat(cut_off, 1)
    coordinator.job_run.tick()
    assert not beat(cut_off, 1, for_s=0.5), "a connection may have been lost"
    lasts(coordinator)
    [before] = other.batches()
    assert before.batch != held.batch
    assert "shards 0, 1 to refuse worker-0" in coordinator.job_run.waiting_for()
    coordinator.settle()
    [again] = other.batches(other.train([before]))
    assert (again.batch, again.number > held.number) == (held.batch, True)
    assert beat(cut_off, 1), "it has to register again"
    cut_off.join()
    assert cut_off.name != "worker-0"
    assert isinstance(cut_off.lease(), Wait), "the route is broken under another name, too"
    beat(cut_off)
    assert cut_off.batches()


def test_a_shard_lost_for_a_moment_costs_no_worker_its_name(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path)
    other = Worker(coordinator, 2)
    worker.batches()
    beat(worker, 1, for_s=2 * GRACE_S)
    beat(worker)
    alive(coordinator, worker, other)
    assert not beat(worker)
    assert stuck(coordinator) == []


def test_complaints_about_a_replaced_shard_do_not_count_against_the_new_one(
    tmp_path: Path,
) -> None:
    coordinator, slow = start(tmp_path)
    other = Worker(coordinator, 2)
    coordinator.shards[1].kill()
    beat(slow, 1)
    beat(other, 1)
    coordinator.job_run.tick()
    coordinator.add(1, 21)
    coordinator.settle()
    other.join()
    beat(other)
    coordinator.job_run.tick()
    assert stuck(coordinator) == [], "the other one has yet to join"
    slow.join()
    beat(slow, 1)
    assert [line.partition(" (")[0] for line in stuck(coordinator)] == [
        "worker-0 on h cannot reach shard 1 at h:1"
    ]
    beat(slow)
    assert stuck(coordinator) == []


@pytest.mark.parametrize("why", ["cut off", "stands still"])
def test_a_stuck_worker_that_has_left_and_is_forgotten_is_not_in_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Others may ask for the status before the next look."""
    monkeypatch.setattr("coordinator.membership.membership.KEPT_WORKERS", 0)
    coordinator, leaving = start(tmp_path, **SYNC)
    other = Worker(coordinator, 2)
    leaving.round()
    if why == "cut off":
        beat(leaving, 1)
    else:
        for _ in range(int(LEAST_S / SIGN_S) + 2):
            alive(coordinator, leaving, other, at=("computing", 1, 0.1))
    assert any("worker-0" in line for line in stuck(coordinator))
    coordinator.engine.sessions.leave(leaving.name, "it ends", fatal=False)
    assert not any("worker-0" in line for line in stuck(coordinator))
    Worker(coordinator, 3)
    assert not any("worker-0" in line for line in stuck(coordinator))


def test_clocks_do_not_wait_for_a_worker_that_is_cut_off(tmp_path: Path) -> None:
    coordinator, cut_off = start(tmp_path, mode="ssp", staleness=0, train_records=16)
    other = Worker(coordinator, 2)
    cut_off.batches()
    other.lease(other.train(other.batches()))
    assert isinstance(other.lease(), Wait)
    beat(cut_off, 0)
    lasts(coordinator)
    assert other.batches()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_worker_that_is_cut_off_gets_no_work_until_its_route_is_whole(
    tmp_path: Path, mode: str
) -> None:
    coordinator, worker = start(tmp_path, **(SYNC if mode == "sync" else {}))
    cut_off = Worker(coordinator, 2)
    beat(cut_off, 1)
    work = cut_off.lease()
    assert isinstance(work, Wait)
    assert work.reason == "worker-1 to reach shard 1"
    alive(coordinator, worker)
    assert isinstance(cut_off.lease(), Wait)
    beat(cut_off)
    assert not isinstance(cut_off.lease(), Wait)


def test_a_peer_that_a_worker_cannot_reach_is_named_with_its_host(tmp_path: Path) -> None:
    coordinator, _ = start(tmp_path, mode="sync", replicas=2, dense="allreduce")
    beat(Worker(coordinator, 2), 1, for_s=3.0)
    (said,) = stuck(coordinator)
    peer = "shard 1 in the worker with pid 1 on h, at h:1"
    assert said.startswith(f"worker-1 on h cannot reach {peer} (for 3.0 s), other workers can")


def test_a_cut_off_pair_is_named_with_worker_shard_and_duration(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path)
    cut_off = Worker(coordinator, 2)
    beat(cut_off, 1, for_s=3.0)
    coordinator.clock.advance(2.0)
    beat(cut_off, 1, for_s=5.0)
    assert stuck(coordinator) == [
        "worker-1 on h cannot reach shard 1 at h:1 (for 5.0 s), other workers can; it gets no "
        "work until it does"
    ]
    told = write_status(coordinator.job_run).workers[1].unreachable
    assert [(one.shard, one.for_s) for one in told] == [(1, 5.0)]
    beat(worker, 1)
    assert stuck(coordinator) == [
        "no worker reaches shard 1 at h:1 (for 5.0 s); check that machine's network and firewall, "
        "and the address that it gives (--advertise)"
    ]
    assert "a worker to reach shard 1 at h:1" in coordinator.job_run.waiting_for()
    assert not write_status(coordinator.job_run).workers[1].unreachable


def test_a_shard_that_no_worker_reaches_costs_no_worker_its_leases(tmp_path: Path) -> None:
    coordinator, first = start(tmp_path)
    second = Worker(coordinator, 2)
    held = [worker.batches() for worker in (first, second)]
    for worker in (first, second):
        beat(worker, 0)
    coordinator.clock.advance(2 * GRACE_S)
    coordinator.job_run.tick()
    assert not any(beat(worker) for worker in (first, second))
    for worker, batches in zip((first, second), held, strict=True):
        worker.received = 0
        assert worker.batches() == batches


def test_routes_to_a_shard_that_is_away_are_not_judged(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path)
    Worker(coordinator, 2)
    worker.batches()
    coordinator.shards[1].kill()
    beat(worker, 1)
    lasts(coordinator)
    assert stuck(coordinator) == []
    assert not beat(worker, 1)


def test_an_initializer_and_an_evaluator_that_are_cut_off_are_replaced(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, eval_records=8, train_records=4)
    for index in range(2):
        coordinator.add(index, 10 + index)
    coordinator.settle()
    first, second = Worker(coordinator, 1), Worker(coordinator, 2)
    assert first.lease() == InitializationWork()
    assert isinstance(second.lease(), Wait)
    beat(first, 1)
    lasts(coordinator)
    coordinator.settle()
    second.initialize()
    first.join()
    beat(first)
    while not isinstance(task := second.lease(), EvaluationWork):
        assert not isinstance(task, Wait)
        second.lease(second.train(list(task.batches)))  # type: ignore[union-attr]
        coordinator.settle()
    beat(second, 0)
    assert first.lease() == task


def test_two_workers_that_are_cut_off_leave_room_for_a_third(tmp_path: Path) -> None:
    """Shards hold two attempts of a micro-batch at most."""
    coordinator, first = start(tmp_path, **SYNC)
    second, third = Worker(coordinator, 2), Worker(coordinator, 3)
    held, own = first.round(), third.round()
    third.commit(own)
    beat(first, 0)
    doubled = second.round()
    assert doubled.attempt.batch == held.attempt.batch
    assert isinstance(third.lease(), Wait)
    beat(second, 1)
    lasts(coordinator)
    assert isinstance(third.lease(), Wait), "a shard may hold both"
    coordinator.settle()
    assert beat(second)
    assert not beat(first, 0)
    assert third.round().attempt.batch == held.attempt.batch


def test_a_route_is_broken_or_a_shard_is_unreached() -> None:
    workers = [Member("a", 1), Member("b", 2), Member("c", 3, state="left")]
    shards = [Place(0, state="ready", watching=True), Place(1, state="silent", watching=True)]
    workers[0].unreachable = {0: 5.0, 1: 6.0}
    routes = read_routes(workers, shards)
    assert (routes.broken, routes.unreached) == ({"a": {0: 5.0}}, {})
    workers[1].unreachable = {0: 4.0}
    routes = read_routes(workers, shards)
    assert (routes.broken, routes.unreached) == ({}, {0: 4.0})


# -- standing still ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "median_s", "stood_s", "why"),
    [
        ("computing", 1.0, LEAST_S, ""),
        ("computing", 1.0, LEAST_S + 1, "has been computing without moving (for 1:01)"),
        ("exchanging", 1.0, LEAST_S + 1, "its median step takes 1.0 s, and 1:00 are allowed"),
        ("computing", TWO_MINUTES, 10 * TWO_MINUTES, ""),
        ("computing", TWO_MINUTES, 10 * TWO_MINUTES + 1, "and 20:00 are allowed"),
        ("data", 1.0, 1e6, ""),
        ("compiling", 1.0, 1e6, ""),
        ("waiting", 1.0, 1e6, ""),
        ("", 1.0, 1e6, ""),
        ("computing", 0.0, 1e6, ""),
    ],
)
def test_a_worker_stands_still(phase: Phase, median_s: float, stood_s: float, why: str) -> None:
    found = stands_still(Position(phase, 7, median_s, since=100.0), 100.0 + stood_s)
    assert why in found
    assert bool(found) == bool(why)


def test_a_change_of_phase_or_position_is_a_move() -> None:
    before = Position("computing", 7, 1.0, since=100.0)
    assert before.then(Position("computing", 7, 1.5, 130.0)) == Position("computing", 7, 1.5, 100.0)
    assert before.then(Position("computing", 9, 1.0, 130.0)).since == 130.0
    assert before.then(Position("exchanging", 7, 1.0, 130.0)).since == 130.0


@pytest.mark.parametrize("mode", ["async", "ssp", "sync"])
def test_a_worker_that_stands_still_loses_its_work_whatever_its_heartbeats_say(
    tmp_path: Path, mode: str
) -> None:
    changes = {"async": {}, "ssp": {"mode": "ssp", "staleness": 3}, "sync": SYNC}[mode]
    coordinator, still = start(tmp_path, **changes)
    other = Worker(coordinator, 2)
    held = still.round().attempt if mode == "sync" else still.batches()[0]
    if mode == "sync":
        other.commit(other.round())
    for _ in range(round(LEAST_S / SIGN_S)):
        alive(coordinator, still, at=("computing", 7, 0.3))
        beat(other, at=("waiting", 3, 0.3))
    assert stuck(coordinator) == []
    for _ in range(2):
        alive(coordinator, still, at=("computing", 7, 0.3))
    if mode != "sync":
        assert beat(still)
        coordinator.settle()
        assert other.batches()[0].batch == held.batch
        with pytest.raises(StaleGeneration):
            still.lease(still.train([held]))
        return
    [line] = stuck(coordinator)
    assert line.startswith("worker-0 on h has been computing without moving (for 1:04)")
    assert other.round().attempt.batch == held.batch
    # It moves: its own commit counts, since it comes first.
    alive(coordinator, still, at=("exchanging", 8, 0.3))
    assert stuck(coordinator) == []
    still.commit(still.round())
    coordinator.settle()
    assert coordinator.job_run.standing == (1, 1)


def test_a_job_with_steps_of_two_minutes_never_loses_a_lease(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path)
    other = Worker(coordinator, 2)
    batches, count = worker.batches(), 0
    for step in range(4):
        # The first step compiles for ten minutes.
        first: tuple[Phase, float] = ("computing", 110.0) if step else ("compiling", 600.0)
        for phase, part_s in (first, ("exchanging", 10.0)):
            count += 1
            for _ in range(round(part_s / SIGN_S)):
                alive(coordinator, other)
                assert not beat(worker, at=(phase, count, TWO_MINUTES if step else 0.0))
                assert stuck(coordinator) == []
        batches = worker.batches(worker.train(batches)) if step < 3 else batches
    assert coordinator.job_run.training.progress.failed == 0


def test_all_stand_still_for_a_cause_that_is_no_worker_s(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path)
    other = Worker(coordinator, 2)
    for one in (worker, other):
        one.batches()
    for _ in range(round(2 * LEAST_S / SIGN_S)):
        alive(coordinator, worker, other, at=("exchanging", 7, 0.3))
    assert len(stuck(coordinator)) == 2
    assert not beat(worker, at=("exchanging", 7, 0.3))


def test_the_time_in_which_shards_are_away_does_not_count(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path)
    other = Worker(coordinator, 2)
    worker.batches()
    coordinator.shards[1].kill()
    for _ in range(round(2 * LEAST_S / SIGN_S)):
        alive(coordinator, worker, at=("exchanging", 7, 0.3))
        beat(other, at=("waiting", 7, 0.3))
    coordinator.add(1, 11)
    coordinator.settle()
    alive(coordinator, worker, at=("exchanging", 7, 0.3))
    assert stuck(coordinator) == []
