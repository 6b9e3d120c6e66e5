"""A worker's tasks of rounds that are decided ahead, step by step."""

from __future__ import annotations

from psrpc.core.errors import RoundPassed, StaleGeneration
from psrpc.v1 import coordinator_pb2 as pb
from tests.worker.protocol.builders import Driver, attempt, batch, work
from tests.worker.scripted_coordinator import FINISHED
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
    Register,
    Rejoin,
    Settle,
    TakeBack,
    TakeLease,
)
from worker.protocol.done import DoneBatch, Stopped

HELD = Pushed(receipts=(b"a", b"b"))


def rounds(*planned: tuple[int, int]) -> pb.Lease:
    """A task of these rounds and batches."""
    attempts = [pb.AttemptAhead(round=number, attempt=attempt(index)) for number, index in planned]
    return pb.Lease(rounds=pb.RoundsTask(attempts=attempts))


class RoundsDriver(Driver):
    def begins(self, *indices: int) -> None:
        self.expects(Expect(tuple(map(batch, indices)), instead=True))

    def pulls(self, number: int, index: int) -> None:
        self.expects(Pull(number, batch=batch(index), ahead=True))

    def computes(self, index: int, following: int | None = None, finite: bool = True) -> None:
        after = None if following is None else batch(following)
        self.expects(Compute(batch(index), after), Computed(0.5, finite))

    def pushes(self, index: int, pushed: Pushed = HELD) -> None:
        self.expects(Push(batch(index), index + 1, ahead=True), pushed)
        self.done(index)

    def ends_its_task(self, index: int) -> None:
        """It confirms before it reports: then the coordinator does not wait for it any more."""
        self.expects(Push(batch(index), index + 1, ahead=True), HELD)
        self.expects(Confirm())
        self.done(index)

    def pushes_and_pulls(self, index: int, number: int, following: int) -> None:
        self.expects(PushNext(batch(index), index + 1, number, batch(following)), HELD)
        self.done(index)

    def done(self, index: int) -> None:
        self.expects(Settle())
        self.expects(Done(DoneBatch(batch(index), index + 1, 0.5, receipts=(b"a", b"b"))))


def test_a_step_is_one_exchange_and_the_next_task_is_asked_for_at_half() -> None:
    worker = RoundsDriver()
    worker.joins(rounds((4, 0), (5, 1), (6, 2), (7, 3)))
    worker.begins(0, 1, 2, 3)
    worker.pulls(4, 0)
    worker.computes(0)
    worker.pushes_and_pulls(0, 5, following=1)
    worker.computes(1)
    worker.pushes_and_pulls(1, 6, following=2)
    worker.expects(LeaseAhead())
    worker.computes(2)
    worker.pushes_and_pulls(2, 7, following=3)
    worker.computes(3)
    worker.ends_its_task(3)
    worker.expects(TakeLease(), rounds((8, 4)))
    # The next round's number was not known when the last gradient was pushed.
    worker.expects(LeaseAhead())
    worker.pulls(8, 4)
    worker.computes(4)
    worker.ends_its_task(4)
    worker.expects(TakeLease(), FINISHED)
    worker.leaves(Leave("the job is done"), Stopped)


def test_several_micro_batches_of_one_round_are_pushed_and_nothing_is_pulled_between() -> None:
    worker = RoundsDriver()
    worker.joins(rounds((4, 0), (4, 1), (6, 2)))
    worker.begins(0, 1, 2)
    worker.pulls(4, 0)
    worker.computes(0, following=1)
    worker.pushes(0)
    worker.expects(LeaseAhead())
    worker.computes(1)
    worker.pushes_and_pulls(1, 6, following=2)
    worker.computes(2)
    worker.ends_its_task(2)
    assert worker.action == TakeLease()


def test_the_gradients_of_a_task_are_confirmed_before_anything_is_waited_for() -> None:
    worker = RoundsDriver()
    worker.joins(rounds((4, 0)))
    worker.begins(0)
    worker.expects(LeaseAhead())
    worker.pulls(4, 0)
    worker.computes(0)
    worker.ends_its_task(0)
    assert worker.action == TakeLease()


def test_a_batch_that_is_not_finite_is_pushed_as_skipped() -> None:
    worker = RoundsDriver()
    worker.joins(rounds((4, 0), (5, 1)))
    worker.begins(0, 1)
    worker.pulls(4, 0)
    worker.expects(Compute(batch(0)), Computed(7.0, False))
    worker.expects(PushNext(batch(0), 1, 5, batch(1), skip=True), HELD)
    worker.expects(Settle())
    worker.expects(Done(DoneBatch(batch(0), 1, 7.0, skipped=True, receipts=(b"a", b"b"))))
    worker.expects(LeaseAhead())
    assert worker.action == Compute(batch(1))


def test_parameters_of_an_ordinary_round_are_used_and_those_ahead_by_the_next_one() -> None:
    worker = RoundsDriver()
    worker.joins(work(3, 9))
    worker.begins(9)
    worker.expects(Pull(3, None, batch(9)))
    worker.computes(9)
    worker.expects(Push(batch(9), 10), Pushed())
    worker.expects(Settle())
    done = DoneBatch(batch(9), 10, 0.5)
    worker.expects(Commit(3, done), Committed(rounds((4, 0)), pulled=True))
    worker.begins(0)
    worker.expects(LeaseAhead())
    worker.computes(0)
    worker.ends_its_task(0)
    worker.expects(TakeLease(), work(5, 1))
    worker.begins(1)
    assert worker.action == Pull(5, None, batch(1))


def test_a_shard_that_had_the_batch_used_no_gradient_of_this_push() -> None:
    worker = RoundsDriver()
    worker.joins(rounds((4, 0)))
    worker.begins(0)
    worker.expects(LeaseAhead())
    worker.pulls(4, 0)
    worker.computes(0)
    worker.expects(Push(batch(0), 1, ahead=True), Pushed(had=(0, 2), asked_again=frozenset({1, 2})))
    worker.expects(Confirm())
    assert worker.action == Settle(unused=(0,))


def test_a_round_that_has_passed_with_its_own_interrupted_push_is_reported_with_that_result() -> (
    None
):
    """Only its shards know that they hold it; the coordinator does not before it is reported."""
    worker = RoundsDriver()
    worker.joins(rounds((4, 0), (5, 1)))
    worker.begins(0, 1)
    worker.pulls(4, 0)
    worker.computes(0)
    push = PushNext(batch(0), 1, 5, batch(1))
    worker.fails(push, StaleGeneration("registered anew"))
    worker.expects(Rejoin("registered anew"))
    worker.expects(Register())
    worker.expects(Join())
    # All that it has not reported is leased again.
    worker.expects(Lease(), rounds((4, 0), (5, 1)))
    worker.begins(0, 1)
    worker.fails(Pull(4, batch=batch(0), ahead=True), RoundPassed("round 5"))
    worker.expects(TakeBack())
    worker.expects(Push(batch(0), 1, skip=True, ahead=True), HELD)
    worker.done(0)
    worker.expects(LeaseAhead())
    worker.pulls(5, 1)
    worker.computes(1)
    worker.ends_its_task(1)
    assert worker.action == TakeLease()


def test_a_push_that_finds_its_round_passed_asks_for_the_receipts_alone() -> None:
    worker = RoundsDriver()
    worker.joins(rounds((4, 0)))
    worker.begins(0)
    worker.expects(LeaseAhead())
    worker.pulls(4, 0)
    worker.computes(0)
    worker.fails(Push(batch(0), 1, ahead=True), RoundPassed("round 5"))
    worker.expects(TakeBack())
    worker.expects(Push(batch(0), 1, skip=True, ahead=True), HELD)
    worker.expects(Confirm())
    worker.done(0)
    assert worker.action == TakeLease()
