"""Work for workers that compute several micro-batches at once, one on each device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core.work import Round, Train
from coordinator.schedule.crew import Crew
from coordinator.schedule.ledger import Ledger
from coordinator.schedule.rounds import Rounds
from tests.coordinator.hand_rounds import close, commit, lease, make


def asks(rounds: Rounds, devices: dict[str, int]) -> None:
    for worker, count in devices.items():
        rounds.ahead.crew.asks(worker, able=False, devices=count)


def leased(work: Round) -> list[int]:
    """The first records of the attempts that a worker computes at once."""
    return [attempt.batch.first for attempt in (work.attempt, *work.beside)]


@pytest.mark.parametrize(
    ("replicas", "devices", "expected"),
    [
        (1, [2], [[0]]),
        (2, [2], [[0, 2]]),
        (3, [2], [[0, 2]]),
        (4, [2, 2], [[0, 2], [4, 6]]),
        (2, [2, 2], [[0], [2]]),
        (3, [1, 2], [[0], [2, 4]]),
        (3, [2, 1], [[0, 2], [4]]),
        (4, [3, 1], [[0, 2, 4], [6]]),
    ],
)
def test_each_device_has_its_share_of_a_round(
    replicas: int, devices: list[int], expected: list[list[int]]
) -> None:
    rounds = make(replicas=replicas)
    names = {f"worker-{index}": count for index, count in enumerate(devices)}
    asks(rounds, names)
    works = [lease(rounds, name, workers=len(names)) for name in names]
    assert [leased(work) for work in works] == expected
    assert all(work.ahead is None for work in works)


def test_each_attempt_has_a_number_and_the_same_ones_are_leased_again() -> None:
    rounds = make(replicas=3)
    asks(rounds, {"w": 2})
    work = lease(rounds, "w", workers=1)
    assert [work.attempt.number, *(each.number for each in work.beside)] == [1, 2]
    assert lease(rounds, "w", workers=1) == work
    commit(rounds, "w", work)
    following = lease(rounds, "w", workers=1)
    assert following.attempt == work.beside[0]
    assert leased(following) == [2, 4]
    assert not following.pull_next
    commit(rounds, "w", following)
    last = lease(rounds, "w", workers=1)
    assert leased(last) == [4]
    assert last.pull_next
    commit(rounds, "w", last)
    assert [attempt.batch.first for attempt in close(rounds).attempts] == [0, 2, 4]


def test_all_attempts_of_a_lost_worker_are_open_to_others() -> None:
    rounds = make(replicas=3)
    asks(rounds, {"gone": 3, "other": 1})
    work = lease(rounds, "gone", workers=1)
    assert rounds.revoke("gone") == [work.attempt, *work.beside]
    assert rounds.release("gone") == 3
    assert lease(rounds, "other", workers=1).attempt.batch.first == 0


def test_attempts_computed_at_once_began_at_once() -> None:
    rounds = make(replicas=2, speculate=True)
    asks(rounds, {"w": 2})
    work = lease(rounds, "w", now=0.0, workers=1)
    commit(rounds, "w", work, now=4.0)
    commit(rounds, "w", lease(rounds, "w", now=4.0, workers=1), now=4.1)
    close(rounds)
    # Two records in four seconds each time; the second was not computed in 0.1 s.
    assert rounds._slow.speeds.expected_s("w", 2) == pytest.approx(4.05, abs=0.01)


@pytest.mark.parametrize(
    ("order", "expected"),
    [("fast slow", [[80, 80], [32]]), ("slow fast", [[40], [80, 72]])],
)
def test_with_balance_micro_batches_are_as_large_as_a_device_is_fast(
    order: str, expected: list[list[int]]
) -> None:
    rounds = make(records=2 * 3 * 64, batch_size=64, replicas=3, balance=True)
    asks(rounds, {"fast": 2, "slow": 1})
    # No speed is known yet, so all are of one size: two take 1 s, at once, and one takes 2 s.
    for worker, ends in (("fast", [1.0, 1.0]), ("slow", [2.0])):
        work = lease(rounds, worker, workers=2)
        for attempt, end in zip((work.attempt, *work.beside), ends, strict=True):
            assert attempt.batch.count == 64
            commit(rounds, worker, replace(work, attempt=attempt), now=end)
    close(rounds)
    # 64, 64 and 32 records a second: the mean of the three devices is 53.3, so 1.2, 1.2 and 0.6
    # micro-batches of 64, in eighths. The mean of the two workers would be 48.
    works = [lease(rounds, worker, now=2.0, workers=2) for worker in order.split()]
    sizes = [[one.batch.count for one in (work.attempt, *work.beside)] for work in works]
    assert sizes == expected


def test_a_task_is_a_multiple_of_the_devices() -> None:
    ledger = Ledger(records=64, batch_size=2, epochs=1)
    work = ledger.lease("w", 0.0, 0, 1, devices=3)
    assert isinstance(work, Train)
    assert len(work.batches) == 3


def test_a_crew_counts_the_devices_of_those_that_asked() -> None:
    crew = Crew(2)
    crew.asks("a", able=True, devices=3)
    assert (crew.lanes(2), crew.devices("a"), crew.devices("b")) == (4, 3, 1)
    crew.left("a")
    assert crew.lanes(1) == 1
