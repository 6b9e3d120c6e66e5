"""The worker's protocol driven by hand: what it is to do next, and how that is answered."""

from __future__ import annotations

import pytest

from psrpc.core.batch import BatchId
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from tests.worker.scripted_coordinator import attempt_at, train_task
from worker.protocol.actions import (
    Action,
    Compute,
    Computed,
    Done,
    Join,
    Lease,
    Leave,
    Pushed,
    PushPull,
    Register,
    Settle,
)
from worker.protocol.conduct import conduct
from worker.protocol.done import DoneBatch


def batch(index: int) -> BatchId:
    return BatchId(0, 8 * index, 8)


def attempt(index: int, number: int | None = None) -> types.Attempt:
    return attempt_at(batch(index), index + 1 if number is None else number)


def task(*indices: int, clock: types.WorkerClock | None = None) -> pb.Lease:
    lease = train_task(*map(attempt, indices))
    if clock is not None:
        lease.train.clock.CopyFrom(clock)
    return lease


def work(number: int, index: int, decision: types.SignedDecision | None = None) -> pb.Lease:
    return pb.Lease(round=pb.RoundWork(round=number, attempt=attempt(index), decision=decision))


class Driver:
    """Steps a worker by hand: says what it is to do next, and what came of it."""

    def __init__(self, *, sums: bool = False, exact: bool = True) -> None:
        self._conduct = conduct(sums=sums, exact=exact)
        self.action: Action = next(self._conduct)

    def expects(self, action: Action, answer: object = None) -> None:
        assert self.action == action
        self.action = self._conduct.send(answer)

    def fails(self, action: Action, error: Exception) -> None:
        assert self.action == action
        self.action = self._conduct.throw(error)

    def joins(self, lease: pb.Lease) -> None:
        self.expects(Register())
        self.expects(Join())
        self.expects(Lease(), lease)

    def applies(
        self, index: int, following: int | None = None, clock: types.WorkerClock | None = None
    ) -> None:
        after = None if following is None else batch(following)
        # Rows that come during the computation would be too old for the next step of ssp.
        ahead = after if clock is None else None
        self.expects(Compute(batch(index), ahead), Computed(0.5, True))
        push = PushPull(batch(index), index + 1, following=after, clock=clock)
        self.expects(push, Pushed(2))
        self.expects(Settle())
        self.expects(Done(DoneBatch(batch(index), index + 1, 0.5, 2)))

    def ends(self, action: Action, last: Leave, kind: type[Exception]) -> None:
        """``action`` is answered by None; then the worker leaves and the error is raised."""
        self.expects(action)
        self.leaves(last, kind)

    def leaves(self, last: Leave, kind: type[Exception]) -> None:
        assert self.action == last
        with pytest.raises(kind):
            self._conduct.send(None)
