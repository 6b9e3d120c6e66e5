"""A worker that computes a micro-batch on each of its devices, step by step."""

from __future__ import annotations

import pytest

from psrpc.core.errors import InvalidArgument, RoundPassed, StaleGeneration
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from tests.worker.protocol.builders import Driver, attempt, batch, task
from tests.worker.protocol.test_rounds_ahead import HELD, rounds
from worker.protocol.actions import (
    Commit,
    Committed,
    Compute,
    Computed,
    Confirm,
    Done,
    Expect,
    Join,
    Lease,
    LeaseAhead,
    Leave,
    Pull,
    Push,
    Pushed,
    PushNext,
    PushPull,
    Register,
    Rejoin,
    Settle,
    TakeBack,
    TakeLease,
)
from worker.protocol.done import DoneBatch


def joined(lease: pb.Lease, devices: int = 2, *, sums: bool = False) -> Driver:
    worker = Driver(sums=sums)
    worker.expects(Register())
    worker.expects(Join(), devices)
    worker.expects(Lease(), lease)
    return worker


def results(*indices: int) -> tuple[Computed, ...]:
    return tuple(Computed(float(index), True) for index in indices)


def round_work(*indices: int, number: int = 0, newest: bool = False) -> pb.Lease:
    """Attempts of a round: the first, and those for other devices."""
    beside = [attempt(index) for index in indices[1:]]
    first = attempt(indices[0])
    return pb.Lease(round=pb.RoundWork(round=number, attempt=first, beside=beside, newest=newest))


def first_of_two_pushed() -> Driver:
    """A worker that has computed both batches of a round, and pushed and reported the first."""
    worker = joined(rounds((4, 0), (4, 1)))
    worker.expects(Expect((batch(0), batch(1)), instead=True))
    worker.expects(LeaseAhead())
    worker.expects(Pull(4, batch=batch(0), ahead=True))
    worker.expects(Compute(batch(0), beside=(batch(1),)), results(0, 1))
    worker.expects(Push(batch(0), 1, ahead=True), HELD)
    worker.expects(Settle(batch=batch(0)))
    worker.expects(Done(DoneBatch(batch(0), 1, 0.0, receipts=HELD.receipts)))
    return worker


# -- async -----------------------------------------------------------------------------------


def test_batches_computed_at_once_are_pushed_one_by_one_and_the_last_push_brings_parameters() -> (
    None
):
    worker = joined(task(0, 1, 2))
    worker.expects(Pull(batch=batch(0)))
    worker.expects(Expect((batch(0), batch(1), batch(2))))
    worker.expects(LeaseAhead())
    worker.expects(Compute(batch(0), batch(2), (batch(1),)), results(0, 1))
    worker.expects(PushPull(batch(0), 1, pull=False), Pushed(2))
    worker.expects(Settle(batch=batch(0)))
    worker.expects(Done(DoneBatch(batch(0), 1, 0.0, 2)))
    worker.expects(PushPull(batch(1), 2, following=batch(2)), Pushed(3, too_stale=(1,)))
    worker.expects(Settle((1,), batch(1)))
    worker.expects(Done(DoneBatch(batch(1), 2, 1.0, 3, too_stale=True)))
    # One is left for two devices.
    worker.applies(2)
    assert worker.action == TakeLease()


def computed_for_a_sum(*results: Computed) -> Driver:
    """A worker that has computed batches 0 and 1, and is to push them; batch 2 follows."""
    worker = joined(task(0, 1, 2), sums=True)
    worker.expects(Pull(batch=batch(0)))
    worker.expects(Expect((batch(0), batch(1), batch(2))))
    worker.expects(LeaseAhead())
    worker.expects(Compute(batch(0), batch(2), (batch(1),)), results)
    return worker


SUM = PushPull(batch(0), 1, following=batch(2), summed=(attempt(1),))


def test_a_sum_is_one_push_and_each_batch_is_reported_with_its_own_receipts() -> None:
    worker = computed_for_a_sum(*results(0, 1))
    answers = tuple(Pushed(3, too_stale=(1,), receipts=(b"%d" % n, b"")) for n in (0, 1))
    worker.expects(SUM, answers)
    for index, answer in enumerate(answers):
        worker.expects(Settle(batch=batch(index)))
        receipts, loss = answer.receipts, float(index)
        done = DoneBatch(batch(index), index + 1, loss, 3, too_stale=True, receipts=receipts)
        worker.expects(Done(done))
    # One by itself is no sum.
    worker.applies(2)
    assert worker.action == TakeLease()


def test_a_sum_that_a_shard_refuses_is_computed_again_and_pushed_one_by_one() -> None:
    worker = computed_for_a_sum(*results(0, 1))
    worker.expects(SUM, (Pushed(), Pushed(one_by_one=True)))
    worker.expects(TakeBack())
    worker.applies(0)
    worker.applies(1, following=2)
    worker.applies(2)
    assert worker.action == TakeLease()


def test_a_gradient_that_is_not_finite_is_in_no_sum() -> None:
    worker = computed_for_a_sum(Computed(0.0, True), Computed(1.0, False))
    worker.expects(PushPull(batch(0), 1, pull=False), Pushed())
    worker.expects(Settle(batch=batch(0)))
    worker.expects(Done(DoneBatch(batch(0), 1, 0.0)))
    assert worker.action == PushPull(batch(1), 2, skip=True, following=batch(2))


def test_ssp_is_refused_before_the_first_step() -> None:
    worker = joined(task(0, clock=types.WorkerClock(worker="w")))
    assert isinstance(worker.action, Leave)
    assert worker.action.reason.startswith("ssp counts the steps of each worker")
    worker.leaves(worker.action, InvalidArgument)


# -- sync ------------------------------------------------------------------------------------


def computing(*indices: int, newest: bool = False) -> Driver:
    """A worker that has computed attempts of round 0 at once."""
    worker = joined(round_work(*indices, newest=newest))
    batches = tuple(map(batch, indices))
    worker.expects(Expect(batches, instead=True))
    worker.expects(Pull(None if newest else 0, batch=batches[0]))
    worker.expects(Compute(batches[0], beside=batches[1:]), results(*indices))
    return worker


def commits(worker: Driver, index: int, following: pb.Lease, number: int = 0) -> None:
    worker.expects(Push(batch(index), index + 1), Pushed())
    worker.expects(Settle(batch=batch(index)))
    done = DoneBatch(batch(index), index + 1, float(index))
    worker.expects(Commit(number, done), Committed(following))


def test_attempts_computed_at_once_are_committed_one_by_one() -> None:
    worker = computing(0, 1)
    commits(worker, 0, round_work(1, 2))
    # The one beside it is not computed before the device is free.
    commits(worker, 1, round_work(2, 3))
    worker.expects(Expect((batch(2), batch(3)), instead=True))
    assert worker.action == Compute(batch(2), beside=(batch(3),))


def test_no_more_are_computed_at_once_than_there_are_devices() -> None:
    worker = joined(round_work(0, 1, 2))
    worker.expects(Expect((batch(0), batch(1)), instead=True))
    worker.expects(Pull(0, batch=batch(0)))
    assert worker.action == Compute(batch(0), beside=(batch(1),))


@pytest.mark.parametrize("other", [round_work(2), round_work(1, number=1), task(1)], ids=str)
def test_a_gradient_of_another_device_that_is_not_leased_is_taken_back(other: pb.Lease) -> None:
    worker = computing(0, 1)
    commits(worker, 0, other)
    assert worker.action == TakeBack()


def test_with_backup_workers_it_counts_later_as_of_the_round_that_it_was_computed_from() -> None:
    worker = computing(0, 1, newest=True)
    commits(worker, 0, round_work(1, number=1, newest=True))
    commits(worker, 1, round_work(2, number=1, newest=True), number=0)
    assert worker.action == Expect((batch(2),), instead=True)


def test_a_round_that_passes_takes_all_gradients_with_it() -> None:
    worker = computing(0, 1)
    worker.fails(Push(batch(0), 1), RoundPassed("round 1"))
    worker.expects(TakeBack())
    worker.expects(Lease(), round_work(1))
    worker.expects(Expect((batch(1),), instead=True))
    assert worker.action == Compute(batch(1))


# -- sync, rounds decided ahead --------------------------------------------------------------


def test_attempts_of_one_round_are_computed_at_once_and_those_of_two_are_not() -> None:
    worker = joined(rounds((4, 0), (4, 1), (5, 2), (6, 3)))
    worker.expects(Expect(tuple(map(batch, range(4))), instead=True))
    worker.expects(Pull(4, batch=batch(0), ahead=True))
    worker.expects(Compute(batch(0), beside=(batch(1),)), results(0, 1))
    worker.expects(Push(batch(0), 1, ahead=True), HELD)
    worker.expects(Settle(batch=batch(0)))
    worker.expects(Done(DoneBatch(batch(0), 1, 0.0, receipts=HELD.receipts)))
    worker.expects(PushNext(batch(1), 2, 5, batch(2)), HELD)
    worker.expects(Settle(batch=batch(1)))
    worker.expects(Done(DoneBatch(batch(1), 2, 1.0, receipts=HELD.receipts)))
    worker.expects(LeaseAhead())
    assert worker.action == Compute(batch(2))


def test_the_last_attempt_of_a_task_is_confirmed_and_not_the_one_before() -> None:
    worker = first_of_two_pushed()
    worker.expects(Push(batch(1), 2, ahead=True), HELD)
    worker.expects(Confirm())
    assert worker.action == Settle(batch=batch(1))


def test_a_push_that_was_cut_off_is_reported_with_the_result_of_its_own_device() -> None:
    worker = first_of_two_pushed()
    worker.fails(Push(batch(1), 2, ahead=True), StaleGeneration("generation 2"))
    worker.expects(Rejoin("generation 2"))
    worker.expects(Register())
    worker.expects(Join(), 2)
    worker.expects(Lease(), rounds((4, 1)))
    worker.expects(Expect((batch(1),), instead=True))
    worker.expects(LeaseAhead())
    worker.fails(Pull(4, batch=batch(1), ahead=True), RoundPassed("round 4 is applied"))
    worker.expects(TakeBack())
    worker.expects(Push(batch(1), 2, True, ahead=True), HELD)
    worker.expects(Confirm())
    worker.expects(Settle())
    assert worker.action == Done(DoneBatch(batch(1), 2, 1.0, receipts=HELD.receipts))
