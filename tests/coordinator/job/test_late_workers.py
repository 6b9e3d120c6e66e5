"""Workers that are late: second attempts at what they hold, and the deadline that names them."""

from __future__ import annotations

from coordinator.core.work import Wait
from coordinator.schedule.micro_batch import Tally
from tests.coordinator.hand_rounds import close, commit, done, lease, make, wait


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


def test_leases_of_slow_workers_are_doubled_unless_they_are_about_to_end() -> None:
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
    # An unknown worker counts as one of the others.
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


def test_the_first_commit_is_named_and_the_other_changes_nothing() -> None:
    rounds = make(records=4, replicas=2, speculate=True)
    slow, quick = lease(rounds, "slow"), lease(rounds, "quick")
    commit(rounds, "quick", quick, 1.0)
    second = lease(rounds, "quick", 2.0)
    commit(rounds, "quick", second, 3.0)
    for now in (4.0, 5.0):
        assert rounds.commit("slow", 0, done(slow), now) is None
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


def test_without_speculation_no_batch_gets_a_second_attempt() -> None:
    rounds = make(records=4, replicas=2)
    lease(rounds, "slow")
    commit(rounds, "quick", lease(rounds, "quick"), 1.0)
    assert wait(rounds, "quick", 10**6) == Wait(
        "slow to finish round 0 (1 of 2 micro-batches done)"
    )


# The deadline.


def test_late_workers_are_named_and_a_round_is_counted_once() -> None:
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
    assert rounds.stragglers(107.0) == ["slow has had epoch 1 positions 2..3 for 6.0 s"]
    assert tally.overdue == 1
    commit(rounds, "slow", lease(rounds, "slow", 108.0), 108.0)
    assert rounds.stragglers(108.0) == []
    close(rounds)
    # The next one is noticed by its commits, without ticks.
    for now in (110.0, 120.0):
        commit(rounds, "w", lease(rounds, "w", 110.0), now)
    assert tally.overdue == 2


def test_without_a_deadline_no_worker_is_late() -> None:
    tally = Tally()
    rounds = make(tally=tally)
    lease(rounds, "slow")
    rounds.tick(10**6)
    assert (rounds.stragglers(10**6), tally.overdue) == ([], 0)
