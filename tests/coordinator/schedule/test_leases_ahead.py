"""Rounds: a worker may be leased its next micro-batch together with the present one."""

from __future__ import annotations

import pytest

from coordinator.core.work import Round, Wait
from coordinator.schedule.rounds import Rounds
from psrpc.core.batch import BatchId
from tests.coordinator.hand_rounds import close, commit, done, lease, make


def first_of(work: Round) -> tuple[int, int | None]:
    """The first records of what is leased, and of what is leased ahead."""
    return work.attempt.batch.first, None if work.ahead is None else work.ahead.batch.first


@pytest.mark.parametrize(
    ("replicas", "workers", "leased"),
    [
        (1, 1, [(0, None)]),
        (2, 2, [(0, None), (2, None)]),
        (3, 1, [(0, 2)]),
        (3, 2, [(0, 2), (4, None)]),
        (4, 2, [(0, 2), (4, 6)]),
        (5, 3, [(0, 2), (4, 6), (8, None)]),
        (6, 6, [(0, None), (2, None), (4, None), (6, None), (8, None), (10, None)]),
    ],
)
def test_no_worker_gets_more_ahead_than_its_share_of_the_round(
    replicas: int, workers: int, leased: list[tuple[int, int | None]]
) -> None:
    rounds = make(replicas=replicas)
    works = [lease(rounds, f"worker-{n}", workers=workers) for n in range(len(leased))]
    assert [first_of(work) for work in works] == leased


def test_the_next_lease_is_what_was_leased_ahead_whether_or_not_it_reached_the_worker() -> None:
    rounds = make(replicas=3)
    work = lease(rounds, "w", workers=1)
    assert lease(rounds, "w", workers=1) == work
    commit(rounds, "w", work)
    following = lease(rounds, "w", workers=1)
    assert following.attempt == work.ahead
    assert first_of(following) == (2, 4)
    commit(rounds, "w", following)
    last = lease(rounds, "w", workers=1)
    assert first_of(last) == (4, None)
    commit(rounds, "w", last)
    assert [attempt.batch.first for attempt in close(rounds).attempts] == [0, 2, 4]


def test_leases_ahead_of_a_lost_worker_are_open_to_others() -> None:
    rounds = make(replicas=2)
    work = lease(rounds, "gone", workers=1)
    assert work.ahead is not None
    assert rounds.revoke("gone") == [work.attempt, work.ahead]
    assert isinstance(rounds.lease("other", 0, 0, 1), Wait)
    assert rounds.release("gone") == 2
    assert first_of(lease(rounds, "other", workers=1)) == (0, 2)
    assert rounds.commit("gone", 0, done(work), 0.0) is None


def test_a_slow_worker_computes_nothing_ahead() -> None:
    rounds = make(records=64, replicas=8)
    for now in (1.0, 2.0):
        works = {name: lease(rounds, name, now - 1) for name in ("fast", "slow")}
        commit(rounds, "fast", works["fast"], now - 0.5)
        commit(rounds, "slow", works["slow"], now)
    assert lease(rounds, "slow", 2.0, workers=2).ahead is None
    assert lease(rounds, "fast", 2.0, workers=2).ahead is not None


def test_the_time_of_what_was_leased_ahead_begins_with_the_commit_before_it() -> None:
    rounds = make(replicas=4, round_deadline_s=1)
    work = lease(rounds, "w", 0.0, workers=1)
    commit(rounds, "w", work, 10.0)
    assert rounds.stragglers(10.5) == [f"w has had {BatchId(0, 2, 2)} for 0.5 s"]


@pytest.mark.parametrize(
    "rounds",
    [make(aggregate=2), make(balance=True), make(speculate=True)],
    ids=["aggregate", "balance", "speculate"],
)
def test_policies_that_choose_workers_late_lease_nothing_ahead(rounds: Rounds) -> None:
    assert lease(rounds, "w", workers=1).ahead is None
