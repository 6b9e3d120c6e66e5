"""The steps of workers on a shard: which worker has to wait for which."""

from __future__ import annotations

import pytest

from pserver.core.step_clocks import StepClocks
from psrpc.core.commands import AwaitedWorkers, WorkerClock


def told(number: int, **workers: tuple[int, int]) -> AwaitedWorkers:
    """The command after change ``number``, with the entry and the steps of each worker."""
    return AwaitedWorkers(number, tuple(WorkerClock(w, *clock) for w, clock in workers.items()))


def entered(staleness: int | None, **steps: int) -> StepClocks:
    clocks = StepClocks(staleness)
    for entry, (worker, count) in enumerate(steps.items(), start=1):
        clocks.enter(worker, entry, count)
    return clocks


@pytest.mark.parametrize(("staleness", "waiting"), [(0, "ab"), (1, "a"), (2, "a"), (3, "")])
def test_a_worker_waits_while_it_is_more_than_s_ahead(staleness: int, waiting: str) -> None:
    clocks = entered(staleness, a=13, b=11, c=10)
    assert "".join(w for w in "abc" if clocks.waits(w)) == waiting


def test_each_attempt_counts_once() -> None:
    clocks = entered(0, fast=0, slow=0)
    assert clocks.step("fast", 5)
    assert clocks.waits("fast")
    assert clocks.step("slow", 6)
    assert not clocks.step("slow", 6)
    assert not clocks.step("slow", 4), "a push of before comes late"
    assert not clocks.waits("slow")
    assert not clocks.waits("fast")


def test_a_reason_names_those_that_are_behind() -> None:
    clocks = entered(1, fast=3, a=0, b=1)
    assert clocks.reason("fast") == "a to catch up with fast, which may be 1 steps ahead"


def test_a_worker_outside_the_clocks_waits_for_none() -> None:
    clocks = entered(0, slow=0)
    clocks.step("passer-by", 9)
    assert not clocks.waits("passer-by")


def test_a_worker_that_is_not_awaited_any_more_delays_none() -> None:
    clocks = entered(0, fast=2, slow=0)
    assert clocks.waits("fast")
    assert clocks.follow(told(3, fast=(1, 2)))
    assert not clocks.waits("fast")
    clocks.enter("slow", 2, 0)
    assert not clocks.waits("fast"), "a repeated pull came after the command"
    clocks.enter("slow", 4, 1)
    assert clocks.waits("fast")


def test_a_command_does_not_end_what_began_after_it() -> None:
    clocks = entered(0, fast=2)
    clocks.enter("slow", 4, 1)
    clocks.follow(told(3, fast=(1, 2)))
    assert clocks.waits("fast")


def test_an_older_command_changes_nothing() -> None:
    clocks = entered(0, fast=2)
    assert clocks.follow(told(5, fast=(1, 2), slow=(5, 1)))
    assert not clocks.follow(told(5))
    assert not clocks.follow(told(4, fast=(1, 2)))
    assert clocks.waits("fast")


def test_steps_that_are_told_and_steps_that_are_counted_are_not_added() -> None:
    clocks = entered(0, fast=3)
    clocks.follow(told(4, fast=(1, 3), slow=(2, 1)))
    clocks.step("slow", 1)
    clocks.follow(told(5, fast=(1, 3), slow=(2, 2)))
    assert clocks.waits("fast")
    clocks.follow(told(6, fast=(1, 3), slow=(2, 3)))
    assert not clocks.waits("fast")


def test_a_revoked_worker_delays_none() -> None:
    clocks = entered(0, fast=2, slow=0)
    clocks.leave("slow")
    clocks.leave("unknown")
    assert not clocks.waits("fast")


def test_a_generation_begins_without_workers_and_other_policies_count_none() -> None:
    clocks = entered(0, fast=2, slow=0)
    clocks.follow(told(9, fast=(1, 2), slow=(2, 0)))
    clocks.begin(0)
    assert not clocks.waits("fast")
    clocks.enter("fast", 1, 0)
    clocks.enter("slow", 2, 0)
    clocks.step("fast", 1)
    assert clocks.waits("fast")
    clocks.begin(None)
    clocks.enter("fast", 1, 5)
    clocks.enter("slow", 2, 0)
    assert not clocks.step("fast", 2)
    assert not clocks.waits("fast")
