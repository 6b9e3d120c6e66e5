"""The ledger of async training: every batch counts once, also if several workers do it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.work import Report, Train, Wait
from coordinator.schedule.ledger import Ledger
from coordinator.schedule.micro_batch import Tally
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt
from psrpc.core.errors import InvalidArgument
from psrpc.core.intervals import IntervalSet
from psrpc.core.policy import Policy

ALL = 10**9


def make(**changes: object) -> Ledger:
    settings = {"records": 10, "batch_size": 4, "epochs": 2, **changes}
    return Ledger(**settings)  # type: ignore[arg-type]


def lease(ledger: Ledger, worker: str, now: float = 0.0, workers: int = 1) -> list[Attempt]:
    work = ledger.lease(worker, now, ALL, workers)
    return list(work.batches) if isinstance(work, Train) else []


def done(attempt: Attempt, skipped: bool = False) -> Report:
    return Report(attempt.batch, attempt.number, 1.0, 0, skipped)


def drain(ledger: Ledger) -> list[BatchId]:
    """Does all work there is, one lease after another."""
    seen = []
    while batches := lease(ledger, "w"):
        seen += [a.batch for a in batches]
        ledger.report("w", [done(a) for a in batches], 0.0)
    return seen


def test_batches_come_in_position_order_epoch_after_epoch() -> None:
    ledger = make()
    assert drain(ledger) == [BatchId(e, f, c) for e in (0, 1) for f, c in ((0, 4), (4, 4), (8, 2))]
    assert ledger.finished
    assert ledger.take_finished_epochs() == [0, 1]
    assert ledger.take_finished_epochs() == []
    assert (ledger.span.step, ledger.span.examples) == (6, 20)


def test_the_next_epoch_is_leased_while_the_last_is_still_out() -> None:
    ledger = make()
    held = [lease(ledger, w)[0] for w in "abcd"]
    assert held[3].batch == BatchId(1, 0, 4)
    ledger.report("d", [done(held[3])], 0.0)
    assert ledger.span.epoch == 0
    assert ledger.take_finished_epochs() == []


def test_leases_lost_in_transit_are_repeated_and_received_ones_are_not() -> None:
    ledger = make()
    first = lease(ledger, "w")[0]
    second = ledger.lease("w", 0, first.number, 1)
    assert isinstance(second, Train)
    assert ledger.lease("w", 0, first.number, 1) == second
    everything = ledger.lease("w", 0, 0, 1)
    assert everything == Train((first, *second.batches))


def test_a_batch_counts_once_and_from_the_worker_that_holds_it_alone() -> None:
    ledger = make()
    slow = lease(ledger, "slow")[0]
    assert ledger.revoke("slow") == [slow]
    assert ledger.release("slow") == 1
    quick = lease(ledger, "quick")[0]
    assert quick.batch == slow.batch
    assert quick.number != slow.number
    for other in ("slow", "stranger"):
        assert ledger.report(other, [done(slow), done(quick)], 0.0) == []
    assert ledger.report("quick", [done(slow)], 0.0) == []
    assert ledger.report("quick", [done(quick)], 0.0) == [done(quick)]
    assert ledger.report("quick", [done(quick)], 0.0) == []
    assert ledger.span.batches == 1


def test_a_batch_reported_after_it_was_opened_is_leased_again() -> None:
    """Shards answer that they have it."""
    ledger = make(epochs=1)
    slow = lease(ledger, "slow")[0]
    ledger.release("slow")
    assert ledger.report("slow", [done(slow)], 0.0) == []
    assert drain(ledger).count(slow.batch) == 1
    assert ledger.finished


def test_opened_batches_come_before_new_ones() -> None:
    ledger = make()
    held = lease(ledger, "a")[0]
    lease(ledger, "b")
    ledger.release("a")
    assert lease(ledger, "c")[0].batch == held.batch


def test_skipped_batches_are_done_but_are_no_examples() -> None:
    ledger = make(epochs=1)
    ledger.report("w", [done(lease(ledger, "w")[0], skipped=True)], 0.0)
    drain(ledger)
    assert ledger.finished
    assert ledger.span.examples == 6


def test_tasks_grow_to_half_a_second_of_work_and_shrink_towards_the_end() -> None:
    ledger = make(records=4000, batch_size=1, epochs=1)
    now, sizes = 0.0, []
    while batches := lease(ledger, "w", now, workers=2):
        sizes.append(len(batches))
        now += 0.01 * len(batches)
        ledger.report("w", [done(a) for a in batches], now)
    assert sizes[:7] == [1, 2, 4, 8, 16, 32, 50]
    assert set(sizes[7:40]) == {50}
    assert sizes[-1] == 1
    assert sum(sizes) == 4000


def test_idle_time_does_not_make_a_worker_look_slow() -> None:
    ledger = make(records=4000, batch_size=1, epochs=1)
    [attempt] = lease(ledger, "w", 0.0)
    ledger.report("w", [done(attempt)], 0.01)
    batches = lease(ledger, "w", 1000.0)
    ledger.report("w", [done(a) for a in batches], 1000.02)
    assert len(lease(ledger, "w", 1000.02)) == 4


def test_waiting_says_for_whom() -> None:
    ledger = make(records=4, epochs=1)
    [attempt] = lease(ledger, "worker-1")
    assert ledger.lease("worker-2", 0, ALL, 2) == Wait("batches that are under way: worker-1 (1)")
    ledger.report("worker-1", [done(attempt)], 0.0)
    assert ledger.waiting_for() == ""


@pytest.mark.parametrize(
    "batch",
    [BatchId(2, 0, 4), BatchId(0, 1, 4), BatchId(0, 0, 3), BatchId(0, 8, 4), BatchId(0, 12, 4)],
)
def test_a_batch_that_is_none_of_the_job_is_refused_and_changes_nothing(batch: BatchId) -> None:
    ledger = make()
    good = lease(ledger, "w")[0]
    with pytest.raises(InvalidArgument, match="is not a batch of this job"):
        ledger.report("w", [done(good), Report(batch, 9)], 0.0)
    assert ledger.span.batches == 0


def test_resume_leases_exactly_what_is_missing() -> None:
    ledger = make(
        done={0: IntervalSet([(0, 4), (8, 10)]), 1: IntervalSet([(4, 8)])},
        skipped={0: IntervalSet([(8, 10)])},
        first_attempt=1 << 40,
    )
    assert (ledger.span.batches, ledger.span.examples) == (3, 8)
    assert lease(ledger, "w")[0] == Attempt(BatchId(0, 4, 4), 1 << 40)
    ledger.release("w")
    assert drain(ledger) == [BatchId(0, 4, 4), BatchId(1, 0, 4), BatchId(1, 8, 2)]


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), records=st.integers(1, 40), batch_size=st.integers(1, 7))
def test_every_batch_is_counted_once_with_workers_that_die_and_repeat_themselves(
    seed: int, records: int, batch_size: int
) -> None:
    chance = random.Random(seed)
    ledger = Ledger(records=records, batch_size=batch_size, epochs=2)
    held: dict[str, list[Attempt]] = {w: [] for w in "abc"}
    late: list[tuple[str, Attempt]] = []
    counted: list[BatchId] = []
    for now in range(2000):
        worker = chance.choice("abc")
        action = chance.random()
        if action < 0.4:
            held[worker] += lease(ledger, worker, float(now), 3)
        elif action < 0.8 and held[worker]:
            attempt = held[worker].pop(0)
            late.append((worker, attempt))
            counted += [r.batch for r in ledger.report(worker, [done(attempt)], float(now))]
        elif action < 0.9:
            ledger.release(worker)
            late += [(worker, a) for a in held[worker]]
            held[worker] = []
        elif late:
            worker, attempt = chance.choice(late)
            counted += [r.batch for r in ledger.report(worker, [done(attempt)], float(now))]
        if ledger.finished:
            break
    counted += drain(ledger) if not any(held.values()) else []
    assert len(counted) == len(set(counted))
    if ledger.finished:
        assert sum(b.count for b in counted) == 2 * records
        assert ledger.span.examples == 2 * records


# What some shards have, what is refused, and changes.


def too_stale(attempt: Attempt) -> Report:
    return Report(attempt.batch, attempt.number, 1.0, 9, too_stale=True)


def test_partial_batches_come_before_new_ones() -> None:
    ledger = make(
        done={0: IntervalSet([(0, 4)])},
        partial={0: IntervalSet([(8, 10)]), 1: IntervalSet([(4, 8)])},
    )
    assert drain(ledger) == [
        BatchId(0, 8, 2),
        BatchId(1, 4, 4),
        BatchId(0, 4, 4),
        BatchId(1, 0, 4),
        BatchId(1, 8, 2),
    ]


def test_the_step_goes_on_from_where_other_policies_came_to() -> None:
    ledger = make(done={0: IntervalSet([(0, 8)])}, step_offset=-1)
    assert (ledger.span.step, ledger.span.total_steps, ledger.span.batches) == (1, 5, 2)


def test_a_refused_batch_is_open_to_others_first_and_is_not_done() -> None:
    tally = Tally()
    ledger = make(policy=Policy(max_staleness=1), tally=tally)
    [refused] = lease(ledger, "slow")
    assert ledger.report("slow", [too_stale(refused)], 1.0) == []
    assert (ledger.span.batches, tally.too_stale) == (0, 1)
    assert lease(ledger, "slow", 1.0)[0].batch == BatchId(0, 4, 4)
    [again] = lease(ledger, "quick", 1.0)
    assert again.batch == refused.batch
    # What is told twice, or too late, takes nothing from who has it now.
    assert ledger.report("slow", [too_stale(refused)], 2.0) == []
    assert ledger.report("quick", [too_stale(refused)], 2.0) == []
    assert tally.too_stale == 1
    assert ledger.report("quick", [done(again)], 2.0) == [done(again)]
    assert ledger.report("slow", [too_stale(refused)], 3.0) == []
    ledger.release("slow")
    assert again.batch not in drain(ledger)
    assert ledger.finished


def test_a_refused_worker_gets_the_batch_again_when_there_is_no_other() -> None:
    ledger = make(epochs=1, records=4, policy=Policy(max_staleness=0))
    [refused] = lease(ledger, "w")
    ledger.report("w", [too_stale(refused)], 1.0)
    [again] = lease(ledger, "w")
    assert again.batch == refused.batch
    assert again.number > refused.number


def test_nothing_new_of_a_later_epoch_is_leased() -> None:
    ledger = make(until_epoch=1)
    assert {batch.epoch for batch in drain(ledger)} == {0}
    assert (ledger.exhausted, ledger.finished, ledger.idle) == (True, False, True)
    assert ledger.lease("w", 0, ALL, 1) == Wait(
        "the policy to change; nothing new is handed out under the present one"
    )


def test_before_a_change_all_shards_get_what_some_may_have() -> None:
    ledger = make(partial={0: IntervalSet([(8, 10)])}, policy=Policy(max_staleness=1))
    [partial] = lease(ledger, "a")
    [lost] = lease(ledger, "b")
    [refused] = lease(ledger, "c")
    ledger.drain()
    assert ledger.lease("d", 0, ALL, 4) == Wait("batches that are under way: a (1), b (1), c (1)")
    ledger.report("a", [done(partial)], 0.0)
    ledger.report("c", [too_stale(refused)], 0.0)
    ledger.revoke("b")
    assert not ledger.drained
    ledger.release("b")
    assert not ledger.drained
    drained = []
    for attempt in lease(ledger, "c") + lease(ledger, "c"):
        assert attempt.batch in (refused.batch, lost.batch)
        drained.append(ledger.drained)
        ledger.report("c", [done(attempt)], 0.0)
    assert (drained, ledger.drained, ledger.span.batches) == ([False, False], True, 3)
    assert lease(ledger, "c") == []


def test_partial_batches_not_yet_leased_keep_a_drain_from_its_end() -> None:
    ledger = make(partial={0: IntervalSet([(8, 10)])})
    ledger.drain()
    assert not ledger.drained
    assert drain(ledger) == [BatchId(0, 8, 2)]
    assert ledger.drained


policies = st.one_of(
    st.just(Policy()),
    st.builds(lambda s: Policy(max_staleness=s), st.integers(0, 3)),
    st.builds(lambda s: Policy(mode="ssp", staleness=s), st.integers(0, 4)),
)


@settings(max_examples=40)
@given(
    policies,
    st.integers(1, 40),
    st.integers(1, 7),
    st.integers(0, 10**6),
    st.none() | st.integers(0, 60),
)
def test_every_batch_is_done_once_by_all_shards_under_every_policy(
    policy: Policy, records: int, batch_size: int, seed: int, drain_at: int | None
) -> None:
    """Two shards; a batch that only one has taken is leased until the other has it too."""
    chance = random.Random(seed)
    ledger = Ledger(records=records, batch_size=batch_size, epochs=2, policy=policy)
    held: dict[str, list[Attempt]] = {w: [] for w in "abc"}
    told: list[tuple[str, Report]] = []
    shards: tuple[set[BatchId], set[BatchId]] = (set(), set())
    counted: list[BatchId] = []

    def tell(worker: str, report: Report) -> None:
        told.append((worker, report))
        counted.extend(r.batch for r in ledger.report(worker, [report], float(now)))

    def push(worker: str) -> None:
        attempt = held[worker].pop(0)
        refuses = policy.max_staleness is not None and chance.random() < 0.3
        shards[0].add(attempt.batch)
        if refuses:
            tell(worker, too_stale(attempt))
        else:
            shards[1].add(attempt.batch)
            tell(worker, done(attempt))

    for now in range(60):
        worker = chance.choice("abc")
        action = chance.random()
        if now == drain_at:
            ledger.drain()
        if action < 0.4:
            given_out = lease(ledger, worker, float(now), 3)
            others = [a.batch for name, batches in held.items() if name != worker for a in batches]
            assert not {a.batch for a in given_out} & set(others)
            held[worker] += given_out
        elif action < 0.75 and held[worker]:
            push(worker)
        elif action < 0.8:
            ledger.idle_worker(worker)
        elif action < 0.9:
            for attempt in held[worker][:1]:
                shards[0].add(attempt.batch)  # it dies between two shards
            ledger.revoke(worker)
            ledger.release(worker)
            held[worker] = []
        elif told:
            worker, report = chance.choice(told)
            counted.extend(r.batch for r in ledger.report(worker, [report], float(now)))
    if drain_at is not None:
        ledger.drain()
    for worker in "bc":
        ledger.release(worker)
    held = {"a": held["a"], "b": [], "c": []}
    for now in range(60, 2000):
        held["a"] += lease(ledger, "a", float(now))
        if not held["a"]:
            break
        push("a")
    assert len(counted) == len(set(counted)) == ledger.span.batches
    assert shards[0] == shards[1] == set(counted)
    assert ledger.finished if drain_at is None else ledger.drained
