"""A worker that pushes the sum of its micro-batches of a round, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pserver.engine.push_checks import MAX_SUMMED
from psrpc.core.errors import RoundPassed, StaleGeneration
from psrpc.v1 import coordinator_pb2 as pb
from tests.worker.protocol.builders import Driver, attempt, batch
from tests.worker.protocol.test_rounds_ahead import HELD, rounds
from worker.protocol.actions import (
    Compute,
    Computed,
    Confirm,
    Done,
    Expect,
    Join,
    Lease,
    LeaseAhead,
    Pull,
    Push,
    Pushed,
    PushNext,
    Register,
    Rejoin,
    Settle,
    TakeBack,
    TakeLease,
)
from worker.protocol.done import DoneBatch
from worker.protocol.rounds_ahead import MOST_SUMMED

FINITE = Computed(0.5, True)
REFUSED = Pushed(one_by_one=True)
THREE = tuple(replace(HELD, receipts=(f"{n}".encode(),)) for n in range(3))


def begun(*planned: tuple[int, int], devices: int = 1) -> Driver:
    """A worker that has the parameters of round 4."""
    worker = Driver(exact=False)
    worker.expects(Register())
    worker.expects(Join(), devices)
    begin(worker, rounds(*planned), *[index for _, index in planned])
    worker.expects(Pull(4, batch=batch(planned[0][1]), ahead=True))
    return worker


def begin(worker: Driver, lease: pb.Lease, *indices: int) -> None:
    worker.expects(Lease(), lease)
    worker.expects(Expect(tuple(map(batch, indices)), instead=True))
    if isinstance(worker.action, LeaseAhead):
        worker.expects(LeaseAhead())


def computes(worker: Driver, *indices: int, add: bool = True) -> None:
    """One after the other."""
    for index, after in zip(indices, [*indices[1:], None], strict=True):
        following = None if after is None else batch(after)
        worker.expects(Compute(batch(index), following, add=add), FINITE)


def done(worker: Driver, index: int, pushed: Pushed, *, skipped: bool = False) -> None:
    worker.expects(Settle(batch=batch(index)))
    report = DoneBatch(batch(index), index + 1, 0.5, skipped=skipped, receipts=pushed.receipts)
    worker.expects(Done(report))


def test_the_micro_batches_of_a_round_are_added_up_and_pushed_once() -> None:
    worker = begun((4, 0), (4, 1), (4, 2), (5, 3), (5, 4))
    computes(worker, 0, 1, 2)
    beside = (attempt(0), attempt(1))
    # It is pushed as the highest, whose integers count; the answers follow in that order.
    worker.expects(PushNext(batch(2), 3, 5, batch(3), summed=beside), THREE)
    for index, pushed in zip((0, 1, 2), (THREE[1], THREE[2], THREE[0]), strict=True):
        done(worker, index, pushed)
    computes(worker, 3, 4)
    worker.expects(Push(batch(4), 5, ahead=True, summed=(attempt(3),)), (HELD, HELD))
    worker.expects(Confirm())
    done(worker, 3, HELD)
    done(worker, 4, HELD)
    assert worker.action == TakeLease()


def test_so_are_those_of_several_devices_group_by_group() -> None:
    worker = begun((4, 0), (4, 1), (4, 2), devices=2)
    worker.expects(Compute(batch(0), batch(2), (batch(1),), add=True), (FINITE, FINITE))
    worker.expects(Compute(batch(2), add=True), FINITE)
    assert worker.action == Push(batch(2), 3, ahead=True, summed=(attempt(0), attempt(1)))


def test_one_that_is_alone_in_its_round_is_pushed_as_ever() -> None:
    worker = begun((4, 0), (5, 1))
    worker.expects(Compute(batch(0)), FINITE)
    assert worker.action == PushNext(batch(0), 1, 5, batch(1))


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_that_is_not_finite_is_pushed_by_itself_before_the_sum(bad: int) -> None:
    worker = begun((4, 0), (4, 1), (4, 2))
    for index in range(3):
        following = None if index == 2 else batch(index + 1)
        worker.expects(Compute(batch(index), following, add=True), Computed(0.5, index != bad))
    worker.expects(Push(batch(bad), bad + 1, True, ahead=True), HELD)
    first, last = [index for index in range(3) if index != bad]
    worker.expects(Push(batch(last), last + 1, ahead=True, summed=(attempt(first),)), (HELD, HELD))
    worker.expects(Confirm())
    for index in range(3):
        done(worker, index, HELD, skipped=index == bad)
    assert worker.action == TakeLease()


def test_a_round_without_a_finite_gradient_has_no_sum() -> None:
    worker = begun((4, 0), (4, 1), (5, 2))
    worker.expects(Compute(batch(0), batch(1), add=True), Computed(0.5, False))
    worker.expects(Compute(batch(1), add=True), Computed(0.5, False))
    worker.expects(Push(batch(0), 1, True, ahead=True), HELD)
    assert worker.action == PushNext(batch(1), 2, 5, batch(2), True)


def test_a_sum_that_is_refused_is_computed_again_and_pushed_one_by_one() -> None:
    """The parameters are still those of the round."""
    worker = begun((4, 0), (4, 1), (5, 2))
    computes(worker, 0, 1)
    summed = (attempt(0),)
    worker.expects(PushNext(batch(1), 2, 5, batch(2), summed=summed), (REFUSED, HELD))
    worker.expects(TakeBack())
    worker.expects(Compute(batch(0), batch(1)), FINITE)
    worker.expects(Push(batch(0), 1, ahead=True), HELD)
    worker.expects(Settle())
    worker.expects(Done(DoneBatch(batch(0), 1, 0.5, receipts=HELD.receipts)))
    worker.expects(Compute(batch(1)), FINITE)
    assert worker.action == PushNext(batch(1), 2, 5, batch(2))


def test_a_sum_that_was_cut_off_is_in_its_round_with_all_its_attempts() -> None:
    worker = begun((4, 0), (4, 1))
    computes(worker, 0, 1)
    worker.fails(
        Push(batch(1), 2, ahead=True, summed=(attempt(0),)), StaleGeneration("generation 2")
    )
    worker.expects(Rejoin("generation 2"))
    worker.expects(Register())
    worker.expects(Join())
    begin(worker, rounds((4, 0), (4, 1)), 0, 1)
    worker.fails(Pull(4, batch=batch(0), ahead=True), RoundPassed("round 4 is applied"))
    for index in range(2):
        worker.expects(TakeBack())
        worker.expects(Push(batch(index), index + 1, True, ahead=True), HELD)
    worker.expects(Confirm())
    done(worker, 0, HELD)
    done(worker, 1, HELD)
    assert worker.action == TakeLease()


def test_more_than_a_push_may_name_are_several_sums() -> None:
    assert MOST_SUMMED == MAX_SUMMED + 1
    worker = begun(*[(4, index) for index in range(MOST_SUMMED + 2)])
    for index in range(MOST_SUMMED):
        worker.expects(Compute(batch(index), batch(index + 1), add=True), FINITE)
    push = worker.action
    assert isinstance(push, Push)
    assert len(push.summed) == MOST_SUMMED - 1
    worker.expects(push, (HELD,) * MOST_SUMMED)
    for index in range(MOST_SUMMED):
        done(worker, index, HELD)
    assert worker.action == Compute(batch(MOST_SUMMED), batch(MOST_SUMMED + 1), add=True)
