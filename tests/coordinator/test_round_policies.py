"""Rounds under the policies against stragglers: backup workers, second attempts, deadlines,
balance, and the drain before a change. No batch is lost or counted twice under any."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.rounds import Rounds
from coordinator.tally import Tally
from coordinator.work import Decision, Report, Round, Wait
from psrpc.batch import BatchId
from psrpc.intervals import IntervalSet
from psrpc.policy import Policy


def make(
    *,
    records: int = 12,
    batch_size: int = 2,
    epochs: int = 1,
    tally: Tally | None = None,
    until_epoch: int | None = None,
    done: dict[int, IntervalSet] | None = None,
    first_round: int = 0,
    **policy: object,
) -> Rounds:
    return Rounds(
        records=records,
        batch_size=batch_size,
        epochs=epochs,
        policy=Policy(mode="sync", **{"replicas": 3, **policy}),  # type: ignore[arg-type]
        generation=1,
        done=done,
        first_round=first_round,
        until_epoch=until_epoch,
        tally=tally,
    )


def lease(rounds: Rounds, worker: str, now: float = 0.0) -> Round:
    work = rounds.lease(worker, now, 0, 1)
    assert isinstance(work, Round)
    return work


def wait(rounds: Rounds, worker: str, now: float = 0.0) -> Wait:
    work = rounds.lease(worker, now, 0, 1)
    assert isinstance(work, Wait)
    return work


def done(work: Round, skipped: bool = False) -> Report:
    return Report(work.attempt.batch, work.attempt.number, 1.0, 0, skipped)


def commit(rounds: Rounds, worker: str, work: Round, now: float = 0.0) -> Report | None:
    return rounds.commit(worker, work.round, done(work), now).counted


def close(rounds: Rounds) -> Decision:
    decision = rounds.decide()
    rounds.close(decision)
    return decision


def firsts(decision: Decision) -> list[int]:
    return [attempt.batch.first for attempt in decision.attempts]


def play(rounds: Rounds, worker: str = "w") -> Decision:
    """One worker does the rest of the round."""
    while not rounds.complete:
        commit(rounds, worker, lease(rounds, worker))
    return close(rounds)


# What is not done.


def test_rounds_are_cut_from_what_is_not_done() -> None:
    rounds = make(
        epochs=2,
        first_round=9,
        done={0: IntervalSet([(0, 2), (4, 6)]), 1: IntervalSet([(2, 12)])},
    )
    assert rounds.total_rounds == 12
    assert rounds.span.batches == 7
    ends = []
    named = []
    while not rounds.finished:
        ends.append((rounds.round, rounds.ends_epoch, rounds.ends_job, rounds.span.epoch))
        named.append(firsts(play(rounds)))
    assert named == [[2, 6, 8], [10], [0]]
    assert ends == [(9, False, False, 0), (10, True, False, 0), (11, True, True, 1)]
    assert rounds.finished_epochs == [0, 1]
    assert rounds.span.batches == 12


def test_no_round_of_a_later_epoch_is_begun() -> None:
    rounds = make(epochs=3, until_epoch=1)
    while not rounds.exhausted:
        play(rounds)
    assert (rounds.round, rounds.total_rounds, rounds.finished) == (2, 6, False)
    assert rounds.idle
    assert wait(rounds, "w").reason == (
        "the policy to change; no round is begun under the present one"
    )


def test_an_epoch_of_a_million_batches_costs_nothing() -> None:
    rounds = make(records=10**9, batch_size=10, epochs=1000, replicas=64)
    assert lease(rounds, "w").attempt.batch == BatchId(0, 0, 10)
    assert rounds.total_rounds == 1000 * -(-(10**8) // 64)


# Backup workers.


def test_a_round_takes_the_first_commits_and_leaves_the_others_open() -> None:
    tally = Tally()
    rounds = make(replicas=3, aggregate=2, tally=tally)
    slow, a, b = (lease(rounds, w) for w in ("slow", "a", "b"))
    assert slow.newest
    commit(rounds, "b", b)
    assert not rounds.complete
    commit(rounds, "a", a)
    assert firsts(close(rounds)) == [2, 4]
    # The straggler's lease goes on, and what it computed counts one round later.
    again = lease(rounds, "slow")
    assert (again.attempt, again.round) == (slow.attempt, 1)
    assert [lease(rounds, w).attempt.batch.first for w in "ab"] == [6, 8]
    counted = commit(rounds, "slow", slow)
    assert counted is not None
    assert counted.staleness == 1
    assert tally.late == 1
    commit(rounds, "a", lease(rounds, "a"))
    assert firsts(close(rounds)) == [0, 6]


def test_the_last_round_of_an_epoch_takes_what_remains_and_waits_for_it() -> None:
    rounds = make(records=10, epochs=2, replicas=4, aggregate=3)
    slow = lease(rounds, "slow")
    assert firsts(play(rounds)) == [2, 4, 6]
    assert rounds.ends_epoch
    commit(rounds, "w", lease(rounds, "w"))
    assert wait(rounds, "w").reason == "round 1 has 1 of 2 micro-batches; awaited: slow"
    commit(rounds, "slow", slow)
    assert firsts(close(rounds)) == [0, 8]
    assert rounds.take_finished_epochs() == [0]
    assert lease(rounds, "w").attempt.batch == BatchId(1, 0, 2)
    assert (rounds.round, rounds.total_rounds) == (2, 4)


def test_commits_that_come_before_the_decision_is_stored_count_in_the_next_round() -> None:
    rounds = make(replicas=3, aggregate=1)
    works = {worker: lease(rounds, worker) for worker in "abc"}
    commit(rounds, "b", works["b"])
    decision = rounds.decide()
    commit(rounds, "a", works["a"])
    assert rounds.decide() == decision
    rounds.close(decision)
    assert firsts(decision) == [2]
    assert rounds.complete
    assert [report.staleness for report in rounds.reports()] == [1]
    assert firsts(close(rounds)) == [0]
    assert not rounds.complete


def test_a_shard_may_have_missed_as_many_decisions_as_it_stages_micro_batches() -> None:
    rounds = make(replicas=3, aggregate=1)
    assert rounds.decisions == []
    works = {worker: lease(rounds, worker) for worker in "abc"}
    for worker, work in works.items():
        commit(rounds, worker, work)
    decided = [close(rounds) for _ in works]
    assert rounds.decisions == decided
    assert rounds.last_decision == decided[-1]
    decided.append(play(rounds))
    assert rounds.decisions == decided[1:]


def test_a_worker_that_names_a_newer_base_is_less_stale() -> None:
    rounds = make(replicas=3, aggregate=1)
    slow = lease(rounds, "slow")
    play(rounds)
    play(rounds)
    report = rounds.commit("slow", 1, done(slow), 0.0).counted
    assert report is not None
    assert report.staleness == 1


def test_an_attempt_of_a_decided_micro_batch_is_nothing_with_backup_workers_too() -> None:
    rounds = make(replicas=3, aggregate=2)
    work = lease(rounds, "a")
    commit(rounds, "a", work)
    play(rounds)
    assert rounds.commit("a", 0, done(work), 0.0).reason == "round 0 is decided already"


def test_a_straggler_that_is_gone_leaves_its_micro_batch_to_others() -> None:
    rounds = make(replicas=3, aggregate=2)
    slow = lease(rounds, "slow")
    play(rounds)
    assert rounds.revoke("slow") == [slow.attempt]
    assert lease(rounds, "a").attempt.batch != slow.attempt.batch
    rounds.release("slow")
    assert lease(rounds, "b").attempt.batch == slow.attempt.batch
    assert rounds.commit("slow", 0, done(slow), 0.0).counted is None


# Second attempts.


def test_an_idle_worker_gets_what_was_held_longest_once_that_is_long() -> None:
    tally = Tally()
    rounds = make(replicas=3, speculate=True, tally=tally)
    slow, slower, quick = (lease(rounds, w, t) for w, t in (("s", 1.0), ("t", 0.0), ("q", 2.0)))
    assert wait(rounds, "q2", 50.0).until is None, "nothing was measured"
    commit(rounds, "q", quick, 5.0)
    # It took 3 s, and would take as long again.
    assert wait(rounds, "q", 5.9).until == 6.0
    second = lease(rounds, "q", 6.0)
    assert second.attempt.batch == slower.attempt.batch
    assert second.attempt.number not in (slow.attempt.number, slower.attempt.number)
    # No third one of the same, and none of one's own.
    third = lease(rounds, "q2", 7.0)
    assert third.attempt.batch == slow.attempt.batch
    assert wait(rounds, "q3", 99.0).until is None
    assert lease(rounds, "q", 99.0) == second
    assert (tally.speculative, tally.superseded) == (2, 0)
    assert commit(rounds, "q", second, 9.0) is not None
    assert commit(rounds, "t", slower, 9.5) is None
    assert commit(rounds, "s", slow, 10.0) is not None
    assert (tally.speculative, tally.superseded) == (2, 2)
    assert close(rounds).attempts == (slow.attempt, second.attempt, quick.attempt)


def test_what_a_slow_worker_has_is_doubled_at_once_and_what_is_about_to_end_is_not() -> None:
    rounds = make(records=12, replicas=2, speculate=True)
    slow, quick = lease(rounds, "slow", 0.0), lease(rounds, "quick", 0.0)
    commit(rounds, "quick", quick, 1.0)
    second = lease(rounds, "quick", 2.0)
    commit(rounds, "quick", second, 3.0)
    close(rounds)
    # The slow one finds out after 5 s, in the next round.
    commit(rounds, "quick", lease(rounds, "quick", 3.0), 4.0)
    slow = lease(rounds, "slow", 5.0)
    doubled = lease(rounds, "quick", 5.5)
    assert doubled.attempt.batch == slow.attempt.batch
    commit(rounds, "quick", doubled, 6.5)
    close(rounds)
    # A worker that nobody knows counts as one of the others.
    unknown = lease(rounds, "new", 6.5)
    commit(rounds, "quick", lease(rounds, "quick", 6.5), 7.5)
    due = wait(rounds, "quick", 7.5).until
    assert due is not None
    assert due > 7.5
    assert lease(rounds, "quick", due).attempt.batch == unknown.attempt.batch


def test_a_second_attempt_that_came_too_late_is_measured_when_it_ends() -> None:
    rounds = make(records=12, replicas=2, speculate=True)
    slow, quick = lease(rounds, "slow"), lease(rounds, "quick")
    commit(rounds, "quick", quick, 3.0)
    second = lease(rounds, "quick", 6.0)
    commit(rounds, "slow", slow, 6.1)
    assert commit(rounds, "quick", second, 9.0) is None
    assert wait(rounds, "quick", 9.0).until is None
    close(rounds)
    # It needs 3 s and not more, however long it had to wait for the next round.
    slow = lease(rounds, "slow", 1000.0)
    lease(rounds, "other", 1000.0)
    assert lease(rounds, "quick", 1000.2).attempt.batch == slow.attempt.batch


def test_the_first_commit_is_named_and_the_other_is_told_so() -> None:
    rounds = make(records=4, replicas=2, speculate=True)
    slow, quick = lease(rounds, "slow"), lease(rounds, "quick")
    commit(rounds, "quick", quick, 1.0)
    second = lease(rounds, "quick", 2.0)
    commit(rounds, "quick", second, 3.0)
    late = rounds.commit("slow", 0, done(slow), 4.0)
    assert late.reason == f"attempt {second.attempt.number} was committed first"
    again = rounds.commit("slow", 0, done(slow), 4.0)
    assert again.reason == f"attempt {slow.attempt.number} was superseded"
    assert close(rounds).attempts == (second.attempt, quick.attempt)


def test_a_third_attempt_only_when_shards_refuse_one_of_the_two() -> None:
    rounds = make(records=4, replicas=2, speculate=True)
    lease(rounds, "slow")
    commit(rounds, "quick", lease(rounds, "quick"), 1.0)
    lease(rounds, "quick", 2.0)
    rounds.revoke("slow")
    assert wait(rounds, "other", 99.0).until is None
    rounds.release("slow")
    assert lease(rounds, "other", 99.0).attempt.batch.first == 0


def test_without_speculation_nobody_gets_a_second_attempt() -> None:
    rounds = make(records=4, replicas=2)
    lease(rounds, "slow")
    commit(rounds, "quick", lease(rounds, "quick"), 1.0)
    assert wait(rounds, "quick", 10**6) == Wait("round 0 has 1 of 2 micro-batches; awaited: slow")


# The deadline.


def test_who_is_late_is_named_and_a_round_is_counted_once() -> None:
    tally = Tally()
    rounds = make(records=8, replicas=2, round_deadline_s=5.0, tally=tally)
    rounds.tick(90.0)
    work = lease(rounds, "quick", 100.0)
    lease(rounds, "slow", 101.0)
    commit(rounds, "quick", work, 102.0)
    rounds.tick(105.0)
    assert (rounds.stragglers(105.0), tally.overdue) == ([], 0)
    for now in (106.0, 107.0):
        rounds.tick(now)
    assert rounds.stragglers(107.0) == ["slow has had epoch 0 positions 2..3 for 6.0 s"]
    assert tally.overdue == 1
    commit(rounds, "slow", lease(rounds, "slow", 108.0), 108.0)
    assert rounds.stragglers(108.0) == []
    close(rounds)
    # The next one is noticed by its commits, if nobody ticks.
    for now in (110.0, 120.0):
        commit(rounds, "w", lease(rounds, "w", 110.0), now)
    assert tally.overdue == 2


def test_without_a_deadline_nobody_is_late() -> None:
    tally = Tally()
    rounds = make(tally=tally)
    lease(rounds, "slow")
    rounds.tick(10**6)
    assert (rounds.stragglers(10**6), tally.overdue) == ([], 0)


# Balance.


def test_faster_workers_get_larger_micro_batches_and_the_round_is_as_large_as_ever() -> None:
    rounds = make(records=160, batch_size=8, replicas=2, balance=True)
    sizes = []
    for number in range(5):
        works = {w: lease(rounds, w, number * 100.0) for w in ("fast", "slow")}
        sizes.append([work.attempt.batch.count for work in works.values()])
        for worker, speed in (("fast", 3.0), ("slow", 1.0)):
            took_s = works[worker].attempt.batch.count / speed
            commit(rounds, worker, works[worker], number * 100.0 + took_s)
        close(rounds)
    assert sizes == [[8, 8], *[[12, 4]] * 4]
    assert (rounds.round, rounds.total_rounds, rounds.span.batches) == (5, 10, 10)


def test_a_cut_is_kept_when_it_is_leased_again() -> None:
    rounds = make(records=160, batch_size=8, replicas=2, balance=True)
    for worker, now in (("fast", 1.0), ("slow", 4.0)):
        commit(rounds, worker, lease(rounds, worker), now)
    close(rounds)
    cut = lease(rounds, "slow", 10.0).attempt.batch
    assert cut == BatchId(0, 16, 3)
    rounds.revoke("slow")
    rounds.release("slow")
    assert lease(rounds, "fast", 11.0).attempt.batch == cut
    assert lease(rounds, "other", 11.0).attempt.batch == BatchId(0, 19, 13)


def test_a_round_that_a_shard_has_a_part_of_is_cut_as_that_was() -> None:
    rounds = Rounds(
        records=32,
        batch_size=8,
        epochs=1,
        policy=Policy(mode="sync", replicas=2, balance=True),
        generation=1,
        partial={0: IntervalSet([(24, 32)])},
    )
    for worker, now in (("fast", 1.0), ("slow", 4.0)):
        commit(rounds, worker, lease(rounds, worker), now)
    close(rounds)
    assert lease(rounds, "slow", 10.0).attempt.batch == BatchId(0, 16, 8)


# The drain.


def test_a_round_that_is_under_way_is_decided_before_a_change() -> None:
    rounds = make()
    work = lease(rounds, "w")
    rounds.drain()
    drained = [rounds.drained]
    commit(rounds, "w", work)
    drained.append(rounds.drained)
    play(rounds)
    drained.append(rounds.drained)
    assert drained == [False, False, True]
    assert wait(rounds, "w").reason.startswith("the policy to change")


def test_a_round_that_nobody_has_begun_is_not_begun_before_a_change() -> None:
    for policy in ({}, {"balance": True}, {"aggregate": 2}):
        rounds = make(**policy)
        play(rounds)
        rounds.drain()
        assert rounds.drained
        assert isinstance(rounds.lease("w", 0, 0, 1), Wait)


def test_with_backup_workers_what_is_held_is_taken_before_a_change_and_no_more() -> None:
    rounds = make(records=40, replicas=5, aggregate=2)
    slow, slower = lease(rounds, "slow"), lease(rounds, "slower")
    commit(rounds, "w", lease(rounds, "w"))
    rounds.drain()
    # Three are begun, and the round takes two: no more are needed.
    assert wait(rounds, "w").reason == "round 0 has 1 of 2 micro-batches; awaited: slow, slower"
    commit(rounds, "slow", slow)
    assert firsts(close(rounds)) == [0, 4]
    assert wait(rounds, "w").reason == "round 1 has 0 of 1 micro-batches; awaited: slower"
    commit(rounds, "slower", slower)
    assert not rounds.ends_job
    assert firsts(close(rounds)) == [2]
    assert rounds.drained
    assert (rounds.round, rounds.span.batches, rounds.total_rounds) == (2, 3, 2 + 9)


def test_what_a_lost_worker_held_need_not_be_done_before_a_change() -> None:
    rounds = make(records=40, replicas=5, aggregate=2)
    lease(rounds, "slow")
    play(rounds)
    rounds.drain()
    rounds.revoke("slow")
    assert not rounds.drained, "a shard may still take it"
    rounds.release("slow")
    assert rounds.drained


# Any of them, with workers that come, go, repeat themselves and are late.

policies = st.one_of(
    st.builds(
        lambda k, late, speculate, balance: Policy(
            mode="sync",
            replicas=k,
            speculate=speculate,
            balance=balance,
            round_deadline_s=3.0 if late else None,
        ),
        st.integers(1, 5),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    st.integers(1, 5).flatmap(
        lambda k: st.builds(
            lambda m: Policy(mode="sync", replicas=k, aggregate=m), st.integers(1, k)
        )
    ),
)


class Play:
    """Random calls on rounds, and what must hold after each."""

    def __init__(self, rounds: Rounds, policy: Policy, chance: random.Random) -> None:
        self.rounds = rounds
        self.policy = policy
        self.chance = chance
        self.now = 0.0
        self.held: dict[str, Round] = {}
        self.gone: list[tuple[str, Round]] = []
        self.live: dict[BatchId, set[int]] = {}
        self.revoked: dict[str, list[tuple[BatchId, int]]] = {}
        self.decisions: list[Decision] = []

    def step(self) -> None:
        self.now += self.chance.random()
        worker = self.chance.choice("abcd")
        action = self.chance.random()
        if action < 0.45:
            self.lease(worker)
        elif action < 0.8 and worker in self.held:
            self.commit(worker, self.held[worker])
        elif action < 0.85 and self.gone:
            self.commit(*self.chance.choice(self.gone))
        elif action < 0.9:
            taken = self.rounds.revoke(worker)
            self.revoked.setdefault(worker, []).extend((a.batch, a.number) for a in taken)
            self.held.pop(worker, None)
        elif action < 0.95:
            self.rounds.release(worker)
            for batch, number in self.revoked.pop(worker, []):
                self.live.get(batch, set()).discard(number)
        else:
            self.rounds.tick(self.now)
        if self.rounds.complete and self.chance.random() < 0.7:
            self.decide()

    def lease(self, worker: str) -> None:
        if worker in self.revoked:
            return
        work = self.rounds.lease(worker, self.now, 0, 4)
        if isinstance(work, Round):
            assert work.round == self.rounds.round
            self.held[worker] = work
            self.gone = [*self.gone, (worker, work)][-20:]
            self.live.setdefault(work.attempt.batch, set()).add(work.attempt.number)
            # What shards hold at most.
            assert len(self.live[work.attempt.batch]) <= 2
            assert len(self.live) <= self.policy.open
        else:
            assert work.until is None or work.until > self.now

    def commit(self, worker: str, work: Round) -> None:
        self.rounds.commit(worker, work.round, done(work), self.now)

    def decide(self) -> None:
        before = self.rounds.span
        decision = self.rounds.decide()
        assert len(decision.attempts) <= self.policy.taken
        assert len({a.batch.epoch for a in decision.attempts}) == 1
        assert list(decision.attempts) == sorted(decision.attempts, key=lambda a: a.batch)
        self.rounds.close(decision)
        self.decisions.append(decision)
        for attempt in decision.attempts:
            assert attempt.number in self.live.pop(attempt.batch)
        if not self.policy.backups:
            self.live.clear()
        assert self.rounds.span.batches >= before.batches

    def finish(self) -> None:
        """One worker does what is left, once the others are gone."""
        for worker in "abcd":
            self.rounds.revoke(worker)
            self.rounds.release(worker)
        for _ in range(10**4):
            if self.rounds.complete:
                decision = self.rounds.decide()
                self.rounds.close(decision)
                self.decisions.append(decision)
            work = self.rounds.lease("last", self.now, 0, 1)
            if isinstance(work, Wait):
                return
            self.commit("last", work)


@settings(max_examples=40, deadline=None)
@given(policies, st.integers(1, 30), st.integers(1, 9), st.integers(0, 10**6))
def test_every_record_counts_once_an_epoch_and_shards_hold_no_more_than_they_can(
    policy: Policy, records: int, batch_size: int, seed: int
) -> None:
    tally = Tally()
    rounds = Rounds(
        records=records, batch_size=batch_size, epochs=2, policy=policy, generation=1, tally=tally
    )
    total = rounds.total_rounds
    play = Play(rounds, policy, random.Random(seed))
    for _ in range(80):
        play.step()
    play.finish()
    assert rounds.finished
    assert [d.round for d in play.decisions] == list(range(total))
    counted = sorted(
        (a.batch.epoch, position)
        for d in play.decisions
        for a in d.attempts
        for position in range(a.batch.first, a.batch.first + a.batch.count)
    )
    assert counted == [(e, p) for e in range(2) for p in range(records)]
    assert rounds.span.examples == 2 * records
    assert rounds.take_finished_epochs() == [0, 1]
    if not policy.speculate:
        assert (tally.speculative, tally.superseded) == (0, 0)
    if not policy.backups:
        assert tally.late == 0


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(0, 10**6), st.booleans())
def test_rounds_are_made_of_the_same_batches_with_speculation_and_without(
    replicas: int, seed: int, speculate: bool
) -> None:
    policy = Policy(mode="sync", replicas=replicas, speculate=speculate)
    rounds = make(records=13, epochs=2, replicas=replicas, speculate=speculate)
    played = Play(rounds, policy, random.Random(seed))
    for _ in range(80):
        played.step()
    played.finish()
    calm = make(records=13, epochs=2, replicas=replicas)
    for decision in played.decisions:
        assert [a.batch for a in decision.attempts] == [a.batch for a in play(calm).attempts]
    assert calm.finished


@settings(max_examples=25, deadline=None)
@given(policies, st.integers(0, 10**6), st.integers(0, 60))
def test_a_drain_ends_at_a_round_boundary_from_which_another_policy_does_the_rest(
    policy: Policy, seed: int, steps: int
) -> None:
    rounds = Rounds(records=23, batch_size=3, epochs=2, policy=policy, generation=1)
    play = Play(rounds, policy, random.Random(seed))
    for _ in range(steps):
        play.step()
    rounds.drain()
    play.finish()
    assert rounds.drained
    done: dict[int, IntervalSet] = {}
    for attempt in (a for d in play.decisions for a in d.attempts):
        batch = attempt.batch
        assert not done.setdefault(batch.epoch, IntervalSet()).overlaps(
            batch.first, batch.first + batch.count
        )
        done[batch.epoch].add(batch.first, batch.first + batch.count)
    after = make(
        records=23, batch_size=3, epochs=2, replicas=2, done=done, first_round=rounds.round
    )
    assert after.span.batches == rounds.span.batches
    assert after.span.examples == rounds.span.examples
    others = Play(after, Policy(mode="sync", replicas=2), random.Random(seed))
    others.finish()
    assert after.finished
    assert after.span.examples == 46
