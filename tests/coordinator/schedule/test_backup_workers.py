"""Rounds with backup workers: the first commits count, and the others in a later round."""

from __future__ import annotations

from coordinator.schedule.micro_batch import Tally
from psrpc.core.batch import BatchId
from tests.coordinator.hand_rounds import close, commit, done, firsts, lease, make, play, wait


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
    assert wait(rounds, "w").reason == "slow to finish round 1 (1 of 2 micro-batches done)"
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
    decided.append(play(rounds))
    assert rounds.decisions == decided[1:]


def test_a_worker_that_names_a_newer_base_is_less_stale() -> None:
    rounds = make(replicas=3, aggregate=1)
    slow = lease(rounds, "slow")
    play(rounds)
    play(rounds)
    report = rounds.commit("slow", 1, done(slow), 0.0)
    assert report is not None
    assert report.staleness == 1


def test_an_attempt_of_a_decided_micro_batch_is_nothing_with_backup_workers_too() -> None:
    rounds = make(replicas=3, aggregate=2)
    work = lease(rounds, "a")
    commit(rounds, "a", work)
    play(rounds)
    assert rounds.commit("a", 0, done(work), 0.0) is None


def test_a_straggler_that_is_gone_leaves_its_micro_batch_to_others() -> None:
    rounds = make(replicas=3, aggregate=2)
    slow = lease(rounds, "slow")
    play(rounds)
    assert rounds.revoke("slow") == [slow.attempt]
    assert lease(rounds, "a").attempt.batch != slow.attempt.batch
    rounds.release("slow")
    assert lease(rounds, "b").attempt.batch == slow.attempt.batch
    assert rounds.commit("slow", 0, done(slow), 0.0) is None
