"""Rounds are divided so that each is over early."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from coordinator.schedule.crew import AGAIN_AFTER, Crew, Member, RoundDivision, shortest_round


def crew(*workers: str) -> Crew:
    made = Crew(1)
    for worker in workers:
        made.asks(worker, able=True)
        made.worked(worker)
    return made


def test_a_slightly_faster_worker_gets_no_more_than_it_computes_while_the_others_do() -> None:
    made = crew("v", "w")
    for _ in range(40):
        assert Counter(made.divide(8, {"v": 1.1, "w": 1.0})) == {"v": 4, "w": 4}
        assert Counter(made.divide(2, {"v": 1.1, "w": 1.0})) == {"v": 1, "w": 1}


def test_a_much_faster_one_gets_more() -> None:
    assert Counter(crew("v", "w").divide(8, {"v": 3.0, "w": 1.0})) == {"v": 6, "w": 2}


def test_a_worker_for_which_all_would_wait_gets_none() -> None:
    made = crew("v", "w")
    assert made.divide(2, {"v": 3.0, "w": 1.0}) == ["v", "v"]


def test_it_gets_one_now_and_then_since_it_may_be_faster_by_now() -> None:
    made = crew("v", "w")
    rounds = [made.divide(2, {"v": 3.0, "w": 1.0}) for _ in range(10 * AGAIN_AFTER)]
    # Each takes 2/3 of what it takes for one.
    assert sum("w" in divided for divided in rounds) == 10 * AGAIN_AFTER // (AGAIN_AFTER * 3 // 2)


def test_a_worker_of_unknown_speed_counts_as_the_mean() -> None:
    made = crew("v", "w", "x")
    assert Counter(made.divide(6, {"v": 1.0, "w": 3.0})) == {"v": 1, "w": 3, "x": 2}


def test_workers_of_nearly_the_same_speed_take_turns() -> None:
    made = crew("v", "w", "x")
    total: Counter[str] = Counter()
    for _ in range(60):
        total.update(made.divide(2, {"v": 1.02, "w": 1.0, "x": 0.98}))
    assert all(abs(count - 40) <= 2 for count in total.values())


def test_a_worker_that_comes_later_does_not_make_up_for_what_it_missed() -> None:
    made = crew("v", "w")
    for _ in range(100):
        made.divide(2, {})
    made.asks("x", able=True)
    made.worked("x")
    total: Counter[str] = Counter()
    for _ in range(6):
        total.update(made.divide(2, {}))
    assert total == {"v": 4, "w": 4, "x": 4}


def test_nor_does_one_that_was_slow_for_long() -> None:
    made = crew("v", "w")
    for _ in range(40):
        made.divide(2, {"v": 3.0, "w": 1.0})
    total: Counter[str] = Counter()
    for _ in range(8):
        total.update(made.divide(3, {}))
    assert abs(total["v"] - total["w"]) <= 2


def test_a_worker_with_two_devices_computes_two_at_a_time() -> None:
    made = crew("v", "w")
    made.asks("v", able=True, devices=2)
    assert Counter(made.divide(3, {"v": 2.0, "w": 1.0})) == {"v": 2, "w": 1}
    assert Counter(made.divide(3, {})) == {"v": 2, "w": 1}


@pytest.mark.parametrize("seed", range(20))
def test_no_round_takes_much_longer_than_the_shortest(seed: int) -> None:
    random = Random(seed)
    members = [Member(f"w{at}", random.uniform(0.2, 2.0), random.randint(1, 3)) for at in range(4)]
    division = RoundDivision()
    for _ in range(20):
        micros = random.randint(1, 12)
        counts = Counter(division.divide(micros, members))
        assert sum(counts.values()) == micros
        length = max(one.takes(counts[one.name]) for one in members)
        assert length <= 1.1 * shortest_round(micros, members) + 1e-9
