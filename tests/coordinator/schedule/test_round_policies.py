"""Rounds under any policy against stragglers, with workers that come, go, repeat themselves and
are late. No batch is lost or counted twice."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.work import Round, Wait
from coordinator.schedule.micro_batch import Tally
from coordinator.schedule.rounds import Rounds
from psrpc.core.batch import BatchId
from psrpc.core.commands import Decision
from psrpc.core.intervals import IntervalSet
from psrpc.core.policy import Policy
from tests.coordinator.hand_rounds import done, make, play

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
            assert isinstance(work, Wait)
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
            assert isinstance(work, Round)
            self.commit("last", work)


@settings(max_examples=40)
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


@settings(max_examples=25)
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


@settings(max_examples=25)
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
