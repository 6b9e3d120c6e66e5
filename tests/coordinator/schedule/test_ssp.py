"""Stale synchronous parallel training: the ledger under clocks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.figures import WorkerHeartbeat
from coordinator.core.work import EvaluationWork, Report, Train, Wait
from coordinator.schedule.ledger import Ledger
from psrpc.core.commands import Attempt, AwaitedWorkers
from psrpc.core.intervals import IntervalSet
from psrpc.core.policy import Policy
from tests.coordinator.whole_coordinator import Worker, start

ALL = 10**9


def make(staleness: int, **changes: object) -> Ledger:
    settings = {
        "records": 1000,
        "batch_size": 1,
        "epochs": 1,
        "policy": Policy(mode="ssp", staleness=staleness),
        **changes,
    }
    return Ledger(**settings)  # type: ignore[arg-type]


def lease(ledger: Ledger, worker: str, now: float = 0.0, workers: int = 1) -> list[Attempt]:
    work = ledger.lease(worker, now, ALL, workers)
    if isinstance(work, Wait):
        return []
    assert work.fresh
    return list(work.batches)


def finish(ledger: Ledger, worker: str, attempts: list[Attempt], now: float = 0.0) -> None:
    ledger.report(worker, [Report(a.batch, a.number) for a in attempts], now)


def step(ledger: Ledger, worker: str, times: int = 1) -> None:
    for _ in range(times):
        [attempt] = lease(ledger, worker)
        finish(ledger, worker, [attempt])


def test_a_worker_waits_for_the_slowest_and_learns_its_name() -> None:
    ledger = make(1)
    slow = lease(ledger, "slow")
    step(ledger, "fast", 2)
    assert ledger.lease("fast", 0.0, ALL, 2) == Wait(
        "slow to catch up: fast has done 2 steps more and may be 1 ahead"
    )
    finish(ledger, "slow", slow)
    step(ledger, "fast")


def test_a_worker_that_waits_or_asks_later_holds_its_clock() -> None:
    ledger = make(0)
    step(ledger, "a")
    step(ledger, "b")
    assert lease(ledger, "b") == [], "a has done one step and will ask again"
    step(ledger, "a")
    assert lease(ledger, "b")


def test_a_worker_due_to_evaluate_holds_the_others_until_its_leases_are_done() -> None:
    ledger = make(0)
    held = lease(ledger, "slow")
    ledger.idle_worker("slow")
    step(ledger, "fast")
    assert lease(ledger, "fast") == [], "slow has not done its first step"
    finish(ledger, "slow", held)
    step(ledger, "fast", 3)


@pytest.mark.parametrize("how", ["idle_worker", "revoke", "release"])
def test_an_evaluating_or_lost_worker_holds_no_other(how: str) -> None:
    ledger = make(0)
    step(ledger, "slow")
    step(ledger, "fast")
    assert lease(ledger, "fast") == []
    getattr(ledger, how)("slow")
    step(ledger, "fast", 5)
    # It comes back at the clock of the others.
    assert lease(ledger, "slow")
    assert lease(ledger, "fast")
    assert lease(ledger, "fast") == []


def test_a_worker_that_finds_no_open_batch_holds_no_other() -> None:
    ledger = make(0, records=4)
    held = {worker: lease(ledger, worker) for worker in "abcd"}
    for worker in "ab":
        finish(ledger, worker, held[worker])
    assert ledger.lease("a", 0.0, ALL, 4) == Wait("batches that are under way: c (1), d (1)")
    ledger.release("c")
    ledger.release("d")
    step(ledger, "b", 2)
    assert ledger.finished


def test_a_new_worker_starts_at_the_least_clock() -> None:
    ledger = make(2)
    step(ledger, "old", 10)
    step(ledger, "new")
    step(ledger, "old", 3)
    assert len(lease(ledger, "new")) == 1
    step(ledger, "old")
    assert lease(ledger, "old") == []


def test_tasks_are_no_longer_than_a_worker_may_run_ahead() -> None:
    ledger = make(4)
    now = 0.0
    lease(ledger, "slow", now)
    sizes = []
    while attempts := lease(ledger, "fast", now, 2):
        sizes.append(len(attempts))
        now += 0.001
        finish(ledger, "fast", attempts, now)
    assert sizes == [1, 2, 2]


def test_a_step_that_is_told_twice_or_by_another_moves_no_clock() -> None:
    ledger = make(0)
    slow = lease(ledger, "slow")
    fast = lease(ledger, "fast")
    for _ in range(3):
        finish(ledger, "fast", fast)
    finish(ledger, "other", slow)
    assert lease(ledger, "fast") == []
    finish(ledger, "slow", slow)
    assert lease(ledger, "fast")


def test_leases_lost_in_transit_are_repeated_at_the_bound_too() -> None:
    ledger = make(0)
    [attempt] = lease(ledger, "w")
    assert ledger.lease("w", 0.0, 0, 1) == Train((attempt,), fresh=True)


def test_a_drain_lets_those_at_the_bound_finish_what_is_left() -> None:
    ledger = make(0, partial={0: IntervalSet([(500, 503)])})
    slow = lease(ledger, "slow")
    step(ledger, "fast")
    ledger.drain()
    assert lease(ledger, "fast") == []
    finish(ledger, "slow", slow)
    step(ledger, "fast")
    assert ledger.drained
    assert lease(ledger, "fast") == []


@settings(max_examples=40)
@given(st.integers(0, 3), st.integers(0, 10**6), st.booleans())
def test_no_worker_starts_a_step_more_than_s_ahead_of_another_in_training(
    staleness: int, seed: int, calm: bool
) -> None:
    """With s = 0 and constant workers this is a barrier."""
    chance = random.Random(seed)
    ledger = make(staleness, records=200)
    held: dict[str, list[Attempt]] = {}
    clocks: dict[str, int] = {}
    """Of those that train now."""
    away: dict[str, int] = {}
    least = 0
    if calm:
        for worker in "abc":
            held[worker] = lease(ledger, worker)
            clocks[worker] = 0
    for _ in range(150):
        worker = chance.choice("abc")
        action = chance.random()
        if action < 0.4 and not held.get(worker):
            held[worker] = lease(ledger, worker)
            if worker not in clocks:
                clocks[worker] = max(least, away.pop(worker, 0))
            ahead = clocks[worker] - min(clocks.values())
            if held[worker]:
                assert ahead + len(held[worker]) - 1 <= staleness
            else:
                assert ahead > staleness, "it waits only where it must"
        elif action < 0.8 and held.get(worker):
            finish(ledger, worker, [held[worker].pop(0)])
            clocks[worker] += 1
        elif not calm and action < 0.9 and not held.get(worker):
            ledger.idle_worker(worker)
            if worker in clocks:
                away[worker] = clocks.pop(worker)
        elif not calm and action > 0.95:
            ledger.revoke(worker)
            ledger.release(worker)
            held[worker] = []
            clocks.pop(worker, None)
            away.pop(worker, None)
        least = min(clocks.values(), default=least)
    if calm:
        assert ledger.span.batches == sum(clocks.values())
        assert max(clocks.values()) - min(clocks.values()) <= staleness + 1


def test_a_waiting_worker_is_told_the_slowest_and_wakes_when_that_one_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, slow = start(
        tmp_path, mode="ssp", staleness=0, epochs=3, train_records=12, eval_records=4
    )
    fast = Worker(coordinator, 22)
    mine = slow.train(slow.batches())
    assert fast.lease(fast.train(fast.batches())) == Wait(
        f"{slow.name} to catch up: {fast.name} has done 1 step more and may be 0 ahead"
    )
    last = slow.train(slow.batches(mine))
    more = fast.train(fast.batches())
    # With this the first epoch is done; its state is kept for an evaluation.
    coordinator.engine.heartbeat_worker(slow.name, WorkerHeartbeat(1, last))
    more = fast.train(fast.batches(more))
    assert isinstance(fast.lease(more), Wait)
    coordinator.settle()
    rung: list[str] = []
    monkeypatch.setattr(coordinator.job_run.bell, "ring", lambda: rung.append("rung"))
    assert isinstance(slow.lease(), EvaluationWork)
    assert rung
    assert isinstance(fast.lease(), Train)


def timely(ledger: Ledger, worker: str, now: float, workers: int = 2) -> Train:
    """The task of a worker that the shards hold back."""
    work = ledger.lease(worker, now, ALL, workers, clocks=True)
    assert isinstance(work, Train)
    assert not work.fresh
    return work


def test_the_tasks_of_a_worker_that_shards_hold_back_are_as_long_as_those_of_async() -> None:
    ledger = make(0)
    timely(ledger, "slow", 0.0)
    sizes, now = [], 0.0
    for _ in range(5):
        work = timely(ledger, "fast", now)
        sizes.append(len(work.batches))
        now += 0.001 * len(work.batches)
        finish(ledger, "fast", list(work.batches), now)
    assert sizes == [1, 2, 4, 8, 16]


def test_a_worker_keeps_its_entry_while_it_has_work_and_gets_another_one_later() -> None:
    ledger = make(0)
    first = timely(ledger, "w", 0.0)
    again = timely(ledger, "w", 0.0)
    assert first.clock == again.clock
    finish(ledger, "w", [*first.batches, *again.batches], 1.0)
    assert timely(ledger, "w", 1.0).clock == first.clock
    assert ledger.lease("w", 1.0, 0, 1, clocks=True).clock == first.clock  # type: ignore[union-attr]
    ledger.revoke("w")
    assert ledger.clocks is not None
    assert ledger.clocks.awaited.workers == ()
    ledger.release("w")
    clock = timely(ledger, "w", 2.0).clock
    assert (clock.entry, clock.steps) == (3, 2)  # type: ignore[union-attr]


def test_a_worker_that_comes_starts_where_the_others_probably_are() -> None:
    ledger = make(2)
    work = timely(ledger, "old", 0.0)
    finish(ledger, "old", list(work.batches), 0.1)
    for now in (0.1, 0.3):
        work = timely(ledger, "old", now)
        finish(ledger, "old", list(work.batches), now + 0.1 * len(work.batches))
    work = timely(ledger, "old", 0.7)
    assert (work.clock.steps, len(work.batches)) == (0, 5)  # type: ignore[union-attr]
    # It has reported five steps and has probably done three of the next five.
    assert ledger.clocks is not None
    reported = ledger.clocks.awaited.workers[0].steps
    assert timely(ledger, "new", 1.05).clock.steps == reported + 3  # type: ignore[union-attr]


def test_one_that_knows_no_clocks_is_held_back_by_its_leases_among_others() -> None:
    ledger = make(0)
    timely(ledger, "new", 0.0)
    step(ledger, "old")
    assert lease(ledger, "old") == []


def test_shards_hear_whom_others_wait_for(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, mode="ssp", staleness=1, train_records=12)
    other = Worker(coordinator, 22)
    coordinator.job_run.training.lease(worker.name, 0.0, ALL, 2, clocks=True)
    coordinator.job_run.training.lease(other.name, 0.0, ALL, 2, clocks=True)
    (missed,) = [
        command
        for command in coordinator.job_run.training.missed(0)
        if isinstance(command, AwaitedWorkers)
    ]
    assert [one.worker for one in missed.workers] == [worker.name, other.name]
    sent: list[object] = []
    coordinator.job_run.training._awaited._send = sent.append
    coordinator.job_run.training.revoke(other.name, lost=True)
    assert sent == [AwaitedWorkers(3, missed.workers[:1])]
