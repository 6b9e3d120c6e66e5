"""Trying again: paces, budgets, and errors that no repetition mends."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import grpc
import pytest

from psrpc.core.errors import (
    AccessDenied,
    CoordinatorRefuses,
    CoordinatorUnreachable,
    DeadlinePassed,
    Forming,
    InvalidArgument,
    NotConnected,
    NotReady,
    OutcomeUnknown,
    Preparing,
    PsError,
    ShardUnreachable,
    StaleGeneration,
    Stalled,
    Unreachable,
)
from psrpc.ops.clock import ManualClock
from psrpc.ops.retry import GaveUp, RetryPolicy, retry
from psrpc.ops.threads import THREADS
from psrpc.wire.status import error_from_rpc

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
    return retry(
        call,
        POLICY,
        lambda tries: ShardUnreachable(f"shard 1 did not answer {tries}"),
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
    with pytest.raises(ShardUnreachable, match=r"shard 1 did not answer 7 tries in 1.*gone"):
        run(time, failing(Unreachable("gone"), 100))
    assert time.clock.now() <= POLICY.budget_s


@pytest.mark.parametrize(
    ("errors", "sent"),
    [
        ([NotConnected("refused"), NotReady("not yet")], False),
        ([DeadlinePassed("late"), NotConnected("refused")], True),
        ([NotConnected("refused"), Unreachable("broke")], True),
    ],
)
def test_whether_a_try_may_have_had_its_effect_is_told(errors: list[PsError], sent: bool) -> None:
    time, told = Time(), []

    def call() -> int:
        raise errors.pop(0) if len(errors) > 1 else errors[0]

    def give_up(tries: GaveUp) -> PsError:
        told.append(tries)
        return ShardUnreachable("gone")

    last = errors[-1]
    with pytest.raises(ShardUnreachable):
        retry(call, POLICY, give_up, stop=time, announce=print, now=time.clock.now)
    (tries,) = told
    assert (tries.last, tries.sent) == (last, sent)


def test_only_silence_counts_against_the_budget() -> None:
    time = Time()
    errors: list[PsError] = [Preparing("reads")] * 50 + [Unreachable("gone")] * 3
    told: list[GaveUp] = []

    def call() -> int:
        raise errors.pop(0) if len(errors) > 1 else errors[0]

    def give_up(tries: GaveUp) -> PsError:
        told.append(tries)
        return ShardUnreachable("gone")

    def alive(error: PsError) -> bool:
        return isinstance(error, Preparing)

    with pytest.raises(ShardUnreachable):
        retry(call, POLICY, give_up, stop=time, announce=print, now=time.clock.now, alive=alive)
    assert time.clock.now() > 4 * POLICY.budget_s
    assert POLICY.budget_s - POLICY.longest_s <= told[0].spent_s <= POLICY.budget_s


@pytest.mark.parametrize("error", [InvalidArgument("wrong"), StaleGeneration("old")])
def test_permanent_errors_are_raised_at_once(error: PsError) -> None:
    time = Time()
    with pytest.raises(type(error)):
        run(time, failing(error, 1))
    assert time.pauses == []


def test_workers_of_a_job_with_a_seed_do_not_all_pause_alike() -> None:
    drawn = []
    for _ in range(2):
        random.seed(7)  # as every worker does with the job's
        drawn.append([THREADS.chance() for _ in range(3)])
    assert drawn[0] != drawn[1]


def test_a_stop_ends_the_tries() -> None:
    time = Time()
    time.set()
    with pytest.raises(ShardUnreachable, match="1 tries"):
        run(time, failing(Unreachable("gone"), 100))


RETRIED = {
    NotReady,
    Forming,
    Preparing,
    Unreachable,
    NotConnected,
    DeadlinePassed,
    Stalled,
    ShardUnreachable,
    CoordinatorUnreachable,
    CoordinatorRefuses,
    OutcomeUnknown,
}


def subclasses(cls: type[PsError]) -> set[type[PsError]]:
    return {cls}.union(*map(subclasses, cls.__subclasses__()))


def tries_of(error: PsError) -> int:
    """How often a call is tried that always comes to ``error``."""
    time, tries = Time(), []

    def call() -> int:
        tries.append(1)
        raise error

    with pytest.raises(PsError):
        run(time, call)
    return len(tries)


# Those that travel; which others there are depends on what was imported before.
TRAVELLING = [cls for cls in subclasses(PsError) if cls.__module__ == PsError.__module__]


@pytest.mark.parametrize("cls", sorted(TRAVELLING, key=str))
def test_of_all_errors_these_are_worth_another_try(cls: type[PsError]) -> None:
    assert (tries_of(cls("so it is")) > 1) == (cls in RETRIED)


class Failed(grpc.RpcError):
    """An error that gRPC raises of its own accord."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "so it is"

    def trailing_metadata(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code.name != "OK"])
def test_of_all_statuses_these_are_worth_another_try(code: grpc.StatusCode) -> None:
    error = error_from_rpc(Failed(code), "shard 1 at host:1")
    retried = {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    }
    assert (tries_of(error) > 1) == (code in retried)
    refused = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
    assert isinstance(error, AccessDenied) == (code in refused)
