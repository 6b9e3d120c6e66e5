"""Detection of slow workers, from the batches that workers report."""

from __future__ import annotations

import pytest

from coordinator.membership.stragglers import (
    HALF_LIFE_S,
    LEAST_BATCHES,
    LEAST_S,
    MOST_NAMED,
    ComputePace,
    name_stragglers,
    slowness,
)


def test_the_first_batch_does_not_count_and_three_more_are_needed() -> None:
    pace = ComputePace()
    pace.look(2.0, 0, 0, 0.0)
    pace.look(9.0, 4, 1, 1.0)  # with compiling
    known = []
    for batch in range(1, LEAST_BATCHES + 1):
        pace.look(9.0 + 0.4 * batch, 4 + 4 * batch, 1 + batch, 10.0)
        known.append(pace.s_per_example)
    assert known[:-1] == [None] * (LEAST_BATCHES - 1)
    assert known[-1] == pytest.approx(0.1)


def test_it_is_watched_for_some_seconds_first() -> None:
    pace = ComputePace()
    pace.look(0.0, 4, 1, 0.0)
    pace.look(1.0, 40, 10, LEAST_S - 0.1)
    assert pace.s_per_example is None
    pace.look(1.5, 44, 11, LEAST_S)
    assert pace.s_per_example == pytest.approx(1.5 / 40, rel=0.1)


def test_time_counts_when_its_batch_is_finished() -> None:
    pace = ComputePace()
    pace.look(1.0, 10, 1, -LEAST_S)
    pace.look(3.0, 40, 4, 0.0)
    before = pace.s_per_example
    assert before == pytest.approx(2.0 / 30)
    pace.look(8.0, 40, 4, 1.0)
    assert pace.s_per_example == before
    pace.look(10.0, 50, 5, 0.0)
    assert pace.s_per_example == pytest.approx(9.0 / 40)


def test_the_past_fades() -> None:
    pace = ComputePace()
    pace.look(0.0, 10, 1, 0.0)
    pace.look(10.0, 20, 4, 0.0)
    pace.look(20.0, 120, 14, HALF_LIFE_S)
    assert pace.s_per_example == pytest.approx((5.0 + 10.0) / (5.0 + 100.0))


def test_another_process_is_measured_from_its_own_start() -> None:
    pace = ComputePace()
    pace.look(100.0, 10, 1, -LEAST_S)
    pace.look(130.0, 40, 4, -LEAST_S)
    pace.look(5.0, 40, 4, -LEAST_S)
    pace.look(6.0, 50, 5, 0.0)
    assert pace.s_per_example is None  # it compiles as well
    pace.look(8.0, 70, 7, 0.0)
    assert pace.s_per_example == pytest.approx(
        (0.5 ** (LEAST_S / HALF_LIFE_S) * 30 + 3) / (0.5 ** (LEAST_S / HALF_LIFE_S) * 30 + 30)
    )


def test_ratios_are_to_the_median_of_those_that_are_known() -> None:
    assert slowness({"a": 1.0, "b": None}) == {}
    assert slowness({"a": 1.0, "b": 2.0, "c": 10.0, "d": None}) == {"a": 0.5, "b": 1.0, "c": 5.0}
    # Of two the slower one stands out, however slow: their mean would hide it.
    assert slowness({"a": 1.0, "b": 5.0}) == {"a": 1.0, "b": 5.0}


def test_stragglers_are_named_from_one_and_a_half_on() -> None:
    assert name_stragglers({"worker-0": 1.49, "worker-1": 1.0}) == []
    assert name_stragglers({"worker-0": 1.5, "worker-1": 1.0, "worker-2": 4.86}) == [
        "worker-2 takes 4.9 times as long per example as the median",
        "worker-0 takes 1.5 times as long per example as the median",
    ]
    assert len(name_stragglers({f"worker-{n}": 3.0 for n in range(99)})) == MOST_NAMED
