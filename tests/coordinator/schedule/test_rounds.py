"""Rounds: defined by the data, decided once, by the first commit of every micro-batch."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.work import Report, Round, Wait
from coordinator.schedule.rounds import Rounds
from pserver.core import staging
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Decision, SnapshotOrder
from psrpc.core.errors import InvalidArgument
from psrpc.core.intervals import IntervalSet
from psrpc.core.policy import Policy
from tests.coordinator.hand_rounds import commit, done, lease, play


def make(policy: Policy | None = None, replicas: int = 3, **changes: object) -> Rounds:
    settings = {
        "records": 10,
        "batch_size": 2,
        "epochs": 2,
        "policy": policy or Policy(mode="sync", replicas=replicas),
        "generation": 1,
        **changes,
    }
    return Rounds(**settings)  # type: ignore[arg-type]


def test_rounds_take_k_batches_in_order_and_never_cross_an_epoch() -> None:
    rounds = make()
    decisions = []
    while not rounds.finished:
        decisions.append(play(rounds))
    assert [d.round for d in decisions] == [0, 1, 2, 3]
    assert [[(a.batch.epoch, a.batch.first) for a in d.attempts] for d in decisions] == [
        [(0, 0), (0, 2), (0, 4)],
        [(0, 6), (0, 8)],
        [(1, 0), (1, 2), (1, 4)],
        [(1, 6), (1, 8)],
    ]
    assert rounds.take_finished_epochs() == [0, 1]
    assert (rounds.span.step, rounds.span.batches, rounds.span.examples) == (4, 10, 20)
    assert rounds.span.total_steps == 4


def test_the_decision_of_the_round_before_comes_with_the_lease() -> None:
    rounds = make()
    assert lease(rounds, "w").decision is None
    decision = play(rounds)
    assert lease(rounds, "w").decision == decision


def test_a_worker_that_asks_again_gets_the_same_attempt() -> None:
    rounds = make()
    assert lease(rounds, "w") == lease(rounds, "w")
    assert lease(rounds, "v").attempt.batch == BatchId(0, 2, 2)


def test_workers_beyond_the_open_micro_batches_wait_and_hear_for_whom() -> None:
    rounds = make(replicas=2)
    first = lease(rounds, "worker-1")
    lease(rounds, "worker-2")
    rounds.commit("worker-1", 0, done(first), 0.0)
    assert rounds.lease("worker-3", 0, 0, 3) == Wait(
        "worker-2 to finish round 0 (1 of 2 micro-batches done)"
    )
    assert rounds.lease("worker-1", 0, 0, 3) == rounds.lease("worker-3", 0, 0, 3)


def test_a_revoked_micro_batch_is_open_once_it_is_released_and_its_late_commit_is_nothing() -> None:
    rounds = make(replicas=1)
    slow = lease(rounds, "slow")
    assert rounds.revoke("slow") == [slow.attempt]
    assert rounds.revoke("slow") == []
    assert rounds.lease("quick", 0, 0, 1) == Wait(
        "slow to finish round 0 (0 of 1 micro-batch done)"
    )
    assert rounds.commit("slow", 0, done(slow), 0.0) is None
    assert rounds.release("slow") == 1
    assert rounds.release("slow") == 0
    quick = lease(rounds, "quick")
    assert quick.attempt.batch == slow.attempt.batch
    assert rounds.commit("slow", 0, done(slow), 0.0) is None
    assert rounds.commit("quick", 0, done(quick), 0.0) == done(quick)
    assert rounds.decide().attempts == (quick.attempt,)


def test_a_commit_that_comes_again_is_no_other_micro_batch() -> None:
    rounds = make(replicas=2)
    work = lease(rounds, "w")
    assert rounds.commit("w", 0, done(work), 0.0) == done(work)
    assert rounds.commit("w", 0, done(work), 0.0) is None
    assert not rounds.complete
    assert len(play(rounds).attempts) == 2


def test_commits_before_the_revocation_stay() -> None:
    rounds = make(replicas=2)
    work = lease(rounds, "w")
    rounds.commit("w", 0, done(work), 0.0)
    assert rounds.revoke("w") == []
    assert play(rounds).attempts[0] == work.attempt


def test_attempt_numbers_are_never_used_again() -> None:
    rounds = make(replicas=1)
    numbers = []
    for worker in "abcd":
        numbers.append(lease(rounds, worker).attempt.number)
        rounds.revoke(worker)
        rounds.release(worker)
    assert numbers == [1, 2, 3, 4]


def test_a_round_is_idle_when_no_worker_holds_an_uncommitted_batch() -> None:
    rounds = make(replicas=2)
    idle = [rounds.idle]
    work = lease(rounds, "w")
    idle.append(rounds.idle)
    rounds.commit("w", 0, done(work), 0.0)
    idle.append(rounds.idle)
    lease(rounds, "v")
    idle.append(rounds.idle)
    rounds.revoke("v")
    idle.append(rounds.idle)
    assert idle == [True, False, True, False, True]


def test_a_commit_of_a_decided_round_changes_nothing() -> None:
    rounds = make()
    work = lease(rounds, "w")
    play(rounds)
    before = rounds.span
    assert rounds.commit("w", 0, done(work), 0.0) is None
    assert rounds.span == before


@pytest.mark.parametrize(
    ("round_number", "batch", "attempt"),
    [(1, BatchId(0, 0, 2), 1), (0, BatchId(0, 6, 2), 1), (0, BatchId(0, 0, 2), 2)],
)
def test_a_commit_of_what_was_not_handed_out_is_refused(
    round_number: int, batch: BatchId, attempt: int
) -> None:
    rounds = make()
    lease(rounds, "w")
    with pytest.raises(InvalidArgument, match="no such attempt was handed out"):
        rounds.commit("w", round_number, Report(batch, attempt), 0.0)


def test_skipped_micro_batches_are_named_in_the_decision_and_are_no_examples() -> None:
    rounds = make(replicas=2)
    first, second = lease(rounds, "a"), lease(rounds, "b")
    rounds.commit("a", 0, done(first, skipped=True), 0.0)
    rounds.commit("b", 0, done(second), 0.0)
    assert rounds.decide().attempts == (first.attempt, second.attempt)
    assert (rounds.span.batches, rounds.span.examples) == (2, 2)


def test_decisions_carry_snapshots_and_generation() -> None:
    rounds = make(replicas=1, generation=4)
    work = lease(rounds, "w")
    rounds.commit("w", 0, done(work), 0.0)
    order = SnapshotOrder("step-00000001", 1, write=True)
    assert rounds.decide((order,)) == Decision(4, 0, (work.attempt,), (order,))


@pytest.mark.parametrize(
    ("first_round", "stops", "batches", "examples", "first"),
    [
        (0, (), 0, 0, (0, 0)),
        (1, (6,), 3, 6, (0, 6)),
        (2, (10,), 5, 10, (1, 0)),
        (3, (10, 6), 8, 16, (1, 6)),
    ],
)
def test_resume_goes_on_at_the_round(
    first_round: int, stops: tuple[int, ...], batches: int, examples: int, first: tuple[int, int]
) -> None:
    done = {epoch: IntervalSet([(0, stop)]) for epoch, stop in enumerate(stops)}
    rounds = make(first_round=first_round, first_attempt=77, done=done)
    assert rounds.total_rounds == 4
    assert rounds.span.batches == batches
    assert rounds.span.examples == examples
    work = lease(rounds, "w")
    assert (work.round, work.decision, work.attempt.number) == (first_round, None, 77)
    assert (work.attempt.batch.epoch, work.attempt.batch.first) == first


def test_resume_after_the_last_round_is_finished() -> None:
    rounds = make(first_round=4, done={e: IntervalSet([(0, 10)]) for e in (0, 1)})
    assert rounds.finished
    assert isinstance(rounds.lease("w", 0, 0, 1), Wait)


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), replicas=st.integers(1, 5))
def test_decisions_do_not_depend_on_workers_that_come_and_go(seed: int, replicas: int) -> None:
    chance = random.Random(seed)
    rounds = make(replicas=replicas)
    expected = make(replicas=replicas)
    given_out: dict[str, Round] = {}
    while not rounds.finished:
        worker = chance.choice("abcd")
        action = chance.random()
        if action < 0.5:
            work = rounds.lease(worker, 0, 0, 4)
            if isinstance(work, Round):
                given_out[worker] = work
        elif action < 0.6:
            rounds.revoke(worker)
            given_out.pop(worker, None)
        elif action < 0.7:
            rounds.release(worker)
        elif worker in given_out:
            rounds.commit(worker, given_out[worker].round, done(given_out[worker]), 0.0)
        if rounds.complete:
            decision = rounds.decide()
            assert [a.batch for a in decision.attempts] == [
                a.batch for a in play(expected).attempts
            ]
            rounds.close(decision)
    assert expected.finished


class StagingShard:
    """A shard that stages contributions, and refuses those of other rounds and generations."""

    def __init__(self) -> None:
        self.staging = staging.Staging(1)
        self.refused: set[str] = set()

    def push(self, worker: str, attempt: Attempt) -> None:
        if worker not in self.refused and not self.staging.holds(attempt):
            self.staging.admit(attempt)
            self.staging.stage(attempt, staging.Staged(attempt.batch.count, {}))

    def refuse(self, worker: str, attempts: list[Attempt]) -> None:
        self.refused.add(worker)
        for attempt in attempts:
            self.staging.drop(attempt)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_however_workers_die_between_two_shards_the_round_can_be_applied(
    order: tuple[int, int],
) -> None:
    """Each of three workers reaches none, one or both of two shards, falls silent and is revoked;
    it comes back to push to some and to commit while the shards are told, before its work is given
    away, or after. Shards hold one attempt at most, and the one that counts is on both."""
    reached = ((), (0,), (1,), (0, 1))
    for pushes in itertools.product(reached, repeat=3):
        for back in ("while told", "before", "after"):
            rounds = make(replicas=1)
            shards = (StagingShard(), StagingShard())
            works: dict[str, Round] = {}

            def come_back(worker: str) -> None:
                for index in order:
                    shards[index].push(worker, works[worker].attempt)  # noqa: B023
                late = rounds.commit(worker, 0, done(works[worker]), 0.0)  # noqa: B023
                assert late is None

            for number, some in enumerate(pushes):
                worker = f"w{number}"
                works[worker] = lease(rounds, worker)
                for index in some:
                    shards[index].push(worker, works[worker].attempt)
                taken = rounds.revoke(worker)
                shards[order[0]].refuse(worker, taken)
                if back == "while told":
                    come_back(worker)
                shards[order[1]].refuse(worker, taken)
                if back == "before":
                    come_back(worker)
                assert isinstance(rounds.lease("other", 0, 0, 1), Wait)
                rounds.release(worker)
            last = lease(rounds, "w3")
            if back == "after":
                for worker in works:
                    come_back(worker)
            for shard in shards:
                shard.push("w3", last.attempt)
                assert len(shard.staging) == 1
            assert rounds.commit("w3", 0, done(last), 0.0)
            named = rounds.decide().attempts
            for shard in shards:
                assert isinstance(shard.staging.decide(named), staging.Ready)


def test_a_worker_waits_for_the_next_round_if_others_will_take_what_is_open() -> None:
    def pulls_next(rounds: Rounds, worker: str, workers: int) -> bool:
        work = rounds.lease(worker, 0, 0, workers)
        assert isinstance(work, Round)
        return work.pull_next

    two = make(replicas=2)
    assert pulls_next(two, "worker-0", 2)
    assert pulls_next(two, "worker-1", 2)
    # Asked again with the same answer.
    assert pulls_next(two, "worker-0", 2)
    three = make(replicas=3)
    # It has two of the three.
    assert not pulls_next(three, "worker-0", 2)
    assert pulls_next(three, "worker-1", 2)
    commit(three, "worker-0", lease(three, "worker-0"))
    assert pulls_next(three, "worker-0", 2)
    assert not pulls_next(make(replicas=2), "alone", 1)
    # With backup workers gradients of any version may count.
    assert not pulls_next(make(Policy(mode="sync", replicas=2, aggregate=1)), "worker-0", 2)
    # How many micro-batches there will be is not known before the round is cut.
    assert not pulls_next(make(Policy(mode="sync", replicas=2, balance=True)), "worker-0", 2)
