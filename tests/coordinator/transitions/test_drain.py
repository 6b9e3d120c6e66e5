"""The drain before a change of policy: rounds under way are decided, and none is begun."""

from __future__ import annotations

from coordinator.core.work import Wait
from tests.coordinator.hand_rounds import close, commit, firsts, lease, make, play, wait


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


def test_a_change_comes_before_a_round_not_yet_begun() -> None:
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
    assert wait(rounds, "w").reason == "slow, slower to finish round 0 (1 of 2 micro-batches done)"
    commit(rounds, "slow", slow)
    assert firsts(close(rounds)) == [0, 4]
    assert wait(rounds, "w").reason == "slower to finish round 1 (0 of 1 micro-batch done)"
    commit(rounds, "slower", slower)
    assert not rounds.ends_job
    assert firsts(close(rounds)) == [2]
    assert rounds.drained
    assert (rounds.round, rounds.span.batches, rounds.total_rounds) == (2, 3, 2 + 9)


def test_a_change_waits_for_no_lease_of_a_lost_worker() -> None:
    rounds = make(records=40, replicas=5, aggregate=2)
    lease(rounds, "slow")
    play(rounds)
    rounds.drain()
    rounds.revoke("slow")
    assert not rounds.drained, "a shard may still take it"
    rounds.release("slow")
    assert rounds.drained
