"""Clocks of stale synchronous parallel training."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.schedule.clocks import Clocks


def entered(staleness: int, **steps: int) -> Clocks:
    """Workers at these clocks."""
    clocks = Clocks(staleness)
    for worker in steps:
        clocks.enter(worker)
    for worker, count in steps.items():
        for _ in range(count):
            clocks.tick(worker)
    return clocks


@pytest.mark.parametrize(("staleness", "allowed"), [(0, (0, 0, 1)), (2, (0, 2, 3)), (5, (2, 5, 6))])
def test_no_worker_starts_a_step_more_than_s_ahead(
    staleness: int, allowed: tuple[int, ...]
) -> None:
    clocks = entered(staleness, fast=4, middle=1, slow=0)
    assert tuple(clocks.allowed(w) for w in ("fast", "middle", "slow")) == allowed


def test_steps_that_are_not_done_count() -> None:
    clocks = entered(3, fast=1, slow=0)
    assert [clocks.allowed("fast", n) for n in range(5)] == [3, 2, 1, 0, 0]


def test_a_waiting_worker_is_told_the_slowest() -> None:
    clocks = entered(1, fast=2, slow=0, middle=1)
    assert clocks.reason("fast") == (
        "slow to catch up: fast has done 2 steps more and may be 1 ahead"
    )


@pytest.mark.parametrize("goes", ["idle", "leave"])
def test_a_worker_that_does_not_train_holds_no_other(goes: str) -> None:
    clocks = entered(0, fast=2, slow=0)
    assert clocks.allowed("fast") == 0
    getattr(clocks, goes)("slow")
    assert clocks.allowed("fast") == 1
    clocks.enter("slow")
    assert clocks.clock("slow") == 2


def test_a_worker_that_returns_keeps_a_greater_clock() -> None:
    clocks = entered(1, fast=2, slow=1)
    clocks.idle("fast")
    clocks.enter("fast")
    assert (clocks.clock("fast"), clocks.allowed("fast")) == (2, 1)


def test_a_joiner_without_others_in_training_starts_at_their_last_clock() -> None:
    clocks = entered(0, a=7)
    clocks.idle("a")
    clocks.enter("new")
    assert clocks.clock("new") == 7
    clocks.enter("a")
    assert (clocks.allowed("a"), clocks.allowed("new")) == (1, 1)


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.integers(0, 4))
def test_the_least_clock_never_falls_and_bounds_the_others(seed: int, staleness: int) -> None:
    chance = random.Random(seed)
    clocks = Clocks(staleness)
    given_out: dict[str, int] = {}
    least = 0
    for _ in range(150):
        worker = chance.choice("abcd")
        action = chance.random()
        if action < 0.4:
            clocks.enter(worker)
            have = given_out.get(worker, 0)
            more = clocks.allowed(worker, have)
            given_out[worker] = have + chance.randint(0, more)
            clock = clocks.clock(worker)
            assert clock is not None
            if given_out[worker] > have:
                # The last of these steps starts when all others are done.
                assert clock + given_out[worker] - 1 - clocks.least <= staleness
        elif action < 0.8 and given_out.get(worker):
            clocks.tick(worker)
            given_out[worker] -= 1
        elif action < 0.9:
            clocks.idle(worker)
        elif action < 0.95:
            clocks.leave(worker)
            given_out.pop(worker, None)
        assert clocks.least >= least
        least = clocks.least


def told(clocks: Clocks) -> dict[str, tuple[int, int]]:
    """The entry and the steps of each worker that others wait for, as shards hear it."""
    return {one.worker: (one.entry, one.steps) for one in clocks.awaited.workers}


def test_shards_hear_of_joining_and_leaving_workers() -> None:
    clocks = Clocks(1)
    first = clocks.enter("a", counted=True)
    assert first == clocks.enter("a", counted=True), "it trains already"
    clocks.enter("b", counted=True)
    assert (clocks.awaited.number, told(clocks)) == (2, {"a": (1, 0), "b": (2, 0)})
    clocks.idle("a")
    clocks.idle("a")
    assert (clocks.awaited.number, told(clocks)) == (3, {"b": (2, 0)})
    clocks.tick("b")
    again = clocks.enter("a", counted=True)
    assert (again.entry, again.steps) == (4, 1)
    clocks.leave("b")
    clocks.leave("b")
    assert (clocks.awaited.number, told(clocks)) == (5, {"a": (4, 1)})


def test_shards_hear_of_the_steps_of_a_worker_that_knows_no_clocks_alone() -> None:
    clocks = Clocks(1)
    clocks.enter("new", counted=True)
    clocks.enter("old")
    clocks.tick("new")
    assert clocks.awaited.number == 2
    clocks.tick("old")
    assert (clocks.awaited.number, told(clocks)["old"]) == (3, (2, 1))


def test_a_joiner_may_start_at_the_others_current_clock() -> None:
    clocks = Clocks(0)
    clocks.enter("a", counted=True)
    assert clocks.enter("b", counted=True, least=7).steps == 7
    assert clocks.least == 0
