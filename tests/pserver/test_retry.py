"""Trying again: paces, budgets, and errors that no repetition mends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from pserver.retry import RetryPolicy, persist
from psrpc.clock import ManualClock
from psrpc.errors import (
    InvalidArgument,
    NotReady,
    PsError,
    ShardUnreachable,
    StaleGeneration,
    Unreachable,
)

POLICY = RetryPolicy(first_s=1, longest_s=4, budget_s=20)


class Time(threading.Event):
    """Waiting on it moves a clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.pauses: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pauses.append(timeout)
        self.clock.advance(timeout)
        return self.is_set()


def run(time: Time, call: Callable[[], int], chance: float = 0.0) -> int:
    return persist(
        call,
        "shard 1 at host:1",
        POLICY,
        stop=time,
        announce=lambda _reason: None,
        now=time.clock.now,
        chance=lambda: chance,
    )


def failing(error: PsError, times: int) -> Callable[[], int]:
    left = [error] * times

    def call() -> int:
        if left:
            raise left.pop()
        return 7

    return call


def test_pauses_double_up_to_the_longest() -> None:
    time = Time()
    assert run(time, failing(Unreachable("gone"), 5)) == 7
    assert time.pauses == [1, 2, 4, 4, 4]


def test_chance_takes_up_to_half_of_a_pause() -> None:
    assert POLICY.pause_s(1, 0.0) == 1
    assert POLICY.pause_s(1, 0.5) == 0.75
    assert POLICY.pause_s(1000, 0.0) == 4


def test_the_budget_ends_in_a_typed_error_that_names_the_shard() -> None:
    time = Time()
    with pytest.raises(ShardUnreachable, match=r"shard 1 at host:1 did not answer 7 tries.*gone"):
        run(time, failing(Unreachable("gone"), 100))
    assert time.clock.now() <= POLICY.budget_s


def test_a_shard_that_answers_that_it_waits_is_not_unreachable() -> None:
    with pytest.raises(NotReady, match="waits for a worker"):
        run(Time(), failing(NotReady("waits for a worker"), 100))


@pytest.mark.parametrize("error", [InvalidArgument("wrong"), StaleGeneration("old")])
def test_what_no_repetition_mends_is_raised_at_once(error: PsError) -> None:
    time = Time()
    with pytest.raises(type(error)):
        run(time, failing(error, 1))
    assert time.pauses == []


def test_a_stop_ends_the_tries() -> None:
    time = Time()
    time.set()
    with pytest.raises(ShardUnreachable, match="1 tries"):
        run(time, failing(Unreachable("gone"), 100))
