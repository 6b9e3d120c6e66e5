"""The limit of an attended job: no batch is begun beyond it, and all below it are done."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.work import Report, Round, RoundsLease, Train
from coordinator.schedule.ledger import Ledger
from coordinator.schedule.open_batches import OpenBatches
from coordinator.schedule.rounds import Rounds
from psrpc.core.commands import Attempt
from psrpc.core.intervals import IntervalSet
from psrpc.core.policy import Policy

WORKERS = ("a", "b", "c")
BATCH = 2


def report(attempt: Attempt, too_stale: bool = False) -> Report:
    return Report(attempt.batch, attempt.number, 1.0, 0, too_stale=too_stale)


limits = st.lists(st.integers(0, 40), max_size=5).map(lambda found: sorted({*found, 0, 60}))
policies = st.one_of(
    st.just(Policy()),
    st.builds(lambda s: Policy(max_staleness=s), st.integers(0, 3)),
    st.builds(lambda s: Policy(mode="ssp", staleness=s), st.integers(0, 4)),
)


@settings(max_examples=25)
@given(policies, limits, st.integers(1, 30), st.integers(0, 10**6))
def test_a_ledger_holds_with_exactly_as_many_batches_done_as_its_limit(
    policy: Policy, limits: list[int], records: int, seed: int
) -> None:
    chance = random.Random(seed)
    ledger = Ledger(records=records, batch_size=BATCH, epochs=2, policy=policy, limit=0)
    total = 2 * -(-records // BATCH)
    held: dict[str, list[Attempt]] = {worker: [] for worker in WORKERS}
    now = 0.0
    for limit in limits:
        ledger.allow(limit)
        while not ledger.held and not ledger.finished:
            worker = chance.choice(WORKERS)
            now += 0.01
            if chance.random() < 0.05:
                ledger.revoke(worker)
                ledger.release(worker)
                held[worker] = []
            elif held[worker] and chance.random() < 0.7:
                stale = policy.max_staleness is not None and chance.random() < 0.2
                ledger.report(worker, [report(held[worker].pop(0), stale)], now)
            else:
                newest = max((attempt.number for attempt in held[worker]), default=10**9)
                work = ledger.lease(worker, now, newest, 3)
                held[worker] += work.batches if isinstance(work, Train) else ()
            under_way = sum(map(len, held.values()))
            assert ledger.span.batches + under_way <= limit
        assert ledger.span.batches == min(limit, total)
        assert not any(held.values())
        firsts = [epoch * records for epoch in ledger.finished_epochs]
        assert firsts == [records * epoch for epoch in range(min(limit, total) * 2 // total)]


def close(rounds: Rounds) -> None:
    """Closes what is complete."""
    while rounds.complete:
        rounds.close(rounds.decide())


def play(
    rounds: Rounds, chance: random.Random, now: float, decided: list[int] | None = None
) -> float:
    """Three workers take part until nothing is left below the limit. ``decided`` gets the rounds
    that are decided ahead."""
    received = dict.fromkeys(WORKERS, 0)
    for _ in range(3000):
        close(rounds)
        if rounds.held or rounds.finished:
            return now
        now += chance.choice((0.001, 0.01))
        worker = chance.choice(WORKERS)
        rounds.ahead.crew.asks(worker, able=True)
        ahead = rounds.look_ahead(None, {}, now)
        if ahead is not None and decided is not None:
            decided += [decision.round for decision in ahead.decisions]
        work = rounds.lease(worker, now, received[worker], 3)
        if isinstance(work, RoundsLease):
            for _, attempt in work.attempts:
                received[worker] = attempt.number
                rounds.report(worker, [report(attempt)], now)
                close(rounds)
        elif isinstance(work, Round):
            rounds.commit(worker, work.round, report(work.attempt), now)
    raise AssertionError(rounds.waiting_for())


@settings(max_examples=20)
@given(
    st.integers(1, 4),
    limits,
    st.integers(1, 90),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_rounds_hold_after_the_one_that_reaches_the_limit(
    replicas: int, limits: list[int], records: int, balance: bool, seed: int
) -> None:
    chance = random.Random(seed)
    policy = Policy(mode="sync", replicas=replicas, balance=balance and replicas > 1)
    rounds = Rounds(
        records=records, batch_size=BATCH, epochs=2, policy=policy, generation=1, limit=0
    )
    per_epoch = -(-records // BATCH)
    ends = [min(first + replicas, per_epoch) for first in range(0, per_epoch, replicas)]
    stops = [0, *ends, *(per_epoch + end for end in ends)]
    now = 0.0
    for limit in limits:
        rounds.allow(limit)
        now = play(rounds, chance, now)
        reached = min((stop for stop in stops if stop >= limit), default=2 * per_epoch)
        assert rounds.span.batches == max(reached, 0)
        assert not rounds.ahead
        assert rounds.round == stops.index(reached)


def test_rounds_are_decided_ahead_up_to_the_limit_and_not_beyond() -> None:
    rounds = Rounds(
        records=400,
        batch_size=BATCH,
        epochs=1,
        policy=Policy(mode="sync", replicas=3),
        generation=1,
        limit=100,
    )
    decided: list[int] = []
    play(rounds, random.Random(1), 0.0, decided)
    assert (rounds.span.batches, rounds.round) == (102, 34)
    assert len(decided) > 10
    assert max(decided) == 33


def test_with_backup_workers_what_is_open_below_the_limit_is_done_and_no_more() -> None:
    rounds = Rounds(
        records=80,
        batch_size=BATCH,
        epochs=1,
        policy=Policy(mode="sync", replicas=4, aggregate=3),
        generation=1,
        limit=6,
    )
    play(rounds, random.Random(2), 0.0)
    assert 6 <= rounds.span.batches < 6 + 4
    assert rounds.held


def test_what_only_some_shards_have_is_done_below_any_limit() -> None:
    ledger = Ledger(
        records=20,
        batch_size=BATCH,
        epochs=1,
        done={0: IntervalSet([(0, 4)])},
        partial={0: IntervalSet([(6, 8)])},
        limit=0,
    )
    held = [ledger.held]
    work = ledger.lease("a", 0.0, 0, 1)
    assert isinstance(work, Train)
    [attempt] = work.batches
    assert attempt.batch.first == 6
    ledger.report("a", [report(attempt)], 0.0)
    assert [*held, ledger.held] == [False, True]
    assert ledger.span.batches == 3
    assert ledger.waiting_for() == "the hold to end; all batches below its limit are done"
    ledger.allow(4)
    work = ledger.lease("a", 0.0, 10**9, 1)
    assert isinstance(work, Train)
    assert [attempt.batch.first for attempt in work.batches] == [4]


def test_without_a_limit_nothing_is_limited() -> None:
    todo = OpenBatches(records=4, batch_size=2, epochs=1, done={})
    while todo.take() is not None:
        assert not todo.limited
    assert not todo.limited
    assert (todo.room, todo.end) == (0, 2)
