"""Rounds are cut from the batches that are not done, in parts as workers are fast."""

from __future__ import annotations

from coordinator.schedule.rounds import Rounds
from psrpc.core.batch import BatchId
from psrpc.core.intervals import IntervalSet
from psrpc.core.policy import Policy
from tests.coordinator.hand_rounds import close, commit, firsts, lease, make, play, wait


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
