"""The worker's protocol in a world of its own: what holds whatever becomes of its actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrpc.core.batch import BatchId
from psrpc.core.errors import (
    InvalidJob,
    OutcomeUnknown,
    PsError,
    RoundPassed,
    StaleGeneration,
)
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import from_batch
from tests.worker.protocol.builders import attempt
from tests.worker.scripted_coordinator import FINISHED
from worker.protocol.actions import (
    Action,
    BeginCommit,
    Commit,
    Committed,
    Compute,
    Computed,
    Done,
    Evaluate,
    Initialize,
    Join,
    Lease,
    LeaseAhead,
    Leave,
    Merge,
    Pull,
    Push,
    Pushed,
    PushPull,
    Register,
    Rejoin,
    Settle,
    TakeBack,
    TakeCommit,
    TakeLease,
)
from worker.protocol.conduct import conduct
from worker.protocol.done import Stopped

Held = tuple[BatchId, int]


@dataclass
class Witness:
    """Looks at every action of a worker, and at what it was answered.

    ``held`` are the attempts that were leased since the worker joined and that it has not
    reported; ``acknowledged`` is the one that all shards have, with its result.
    """

    joined: bool = False
    registered: bool = False
    held: dict[Held, int | None] = field(default_factory=dict)
    round: int | None = None
    newest: bool = False
    computed: tuple[BatchId, Computed] | None = None
    acknowledged: tuple[Held, Computed, Pushed] | None = None
    unsettled: bool = False
    ahead: bool = False
    left: Leave | None = None

    def look(self, action: Action) -> None:
        assert self.left is None, "nothing comes after the farewell"
        match action:
            case Register():
                assert not self.joined
            case Join():
                assert self.registered
                assert not self.joined
            case Rejoin():
                assert action.reason
            case Lease():
                assert self.joined
                assert not self.ahead
            case LeaseAhead():
                assert not self.ahead
                self.ahead = True
            case TakeLease() | TakeCommit():
                assert self.ahead
            case Compute():
                assert not self.unsettled, "what became of the last gradient was not said"
                assert self.computed is None, "the last gradient was neither pushed nor taken back"
                rounds = {r for (batch, _), r in self.held.items() if batch == action.batch}
                assert rounds, "the batch is not leased to this worker in this generation"
                assert rounds <= ({None} if self.newest else {self.round})
            case Push() | PushPull():
                assert (action.batch, action.attempt) in self.held
                assert self.computed is not None
                batch, computed = self.computed
                assert batch == action.batch
                assert action.skip == (not computed.finite)
            case Done() | Commit() | BeginCommit():
                assert not self.unsettled
                assert self.acknowledged is not None, "a shard may lack the batch"
                key, computed, pushed = self.acknowledged
                done = action.batch
                assert (done.batch, done.attempt) == key
                assert (done.loss, done.skipped) == (computed.loss, not computed.finite)
                if isinstance(action, BeginCommit):
                    assert not self.ahead
                    self.ahead = True
                if isinstance(action, Commit | BeginCommit):
                    assert action.round == self.held[key]
                else:
                    assert done.staleness == pushed.staleness
            case Leave():
                self.left = action

    def answered(self, action: Action, answer: Any) -> None:
        match action:
            case Register():
                self.registered = True
            case Join():
                self.joined = True
            case Pull():
                self.round, self.newest = action.round, action.round is None
            case Compute():
                self.computed = (action.batch, answer)
                self.acknowledged = None
            case Push() | PushPull():
                assert self.computed is not None
                self.acknowledged = ((action.batch, action.attempt), self.computed[1], answer)
                self.computed = None
                self.unsettled = True
            case Settle():
                self.unsettled = False
            case TakeBack():
                self.unsettled, self.computed = False, None
            case Done() | BeginCommit():
                del self.held[action.batch.batch, action.batch.attempt]
            case Commit():
                del self.held[action.batch.batch, action.batch.attempt]
                if answer.pulled:
                    assert action.pull_next
                    self.round, self.newest = action.round + 1, False
                self.leased(answer.lease)
            case Lease():
                self.leased(answer)
            case TakeLease() | TakeCommit():
                self.ahead = False
                self.leased(answer)

    def leased(self, lease: pb.Lease) -> None:
        for each in lease.train.batches:
            self.held[from_batch(each.batch), each.attempt] = None
        if lease.HasField("round"):
            work = lease.round
            mine = [work.attempt, work.ahead] if work.HasField("ahead") else [work.attempt]
            # A new lease takes the place of one whose round has passed.
            self.held = {(from_batch(each.batch), each.attempt): work.round for each in mine}

    def failed(self, action: Action, error: Exception) -> None:
        self.unsettled = False
        self.computed = self.acknowledged = None
        if isinstance(action, TakeCommit):
            self.ahead = False
        if isinstance(error, StaleGeneration):
            self.joined = self.registered = self.ahead = self.newest = False
            self.round = None
            self.held.clear()


ERRORS: Sequence[type[Exception]] = [
    StaleGeneration,
    StaleGeneration,
    StaleGeneration,
    OutcomeUnknown,
    InvalidJob,
    Stopped,
]


class World:
    """Everything a worker may meet, drawn by Hypothesis."""

    def __init__(self, draw: Any, sync: bool) -> None:
        self._draw = draw
        self._sync = sync
        self._attempt = 0
        self._round = 0
        self._ahead: types.Attempt | None = None

    def error(self, action: Action) -> Exception | None:
        if isinstance(action, Leave):
            return None
        drawn = self._draw(st.integers(0, 99))
        if drawn < 8:
            kind: type[Exception] = self._draw(st.sampled_from(ERRORS))
            return kind("so it is")
        late = isinstance(action, Push) or (isinstance(action, Pull) and action.round is not None)
        late = late or (isinstance(action, Compute) and self._sync)
        return RoundPassed("so it is") if late and drawn < 25 else None

    def answer(self, action: Action) -> object:
        match action:
            case Lease() | TakeLease():
                return self._lease()
            case TakeCommit():
                assert self._ahead is not None
                as_said = self._draw(st.booleans())
                return work_of(self._round, self._ahead) if as_said else self._lease()
            case Commit():
                pulled = action.pull_next and self._draw(st.booleans())
                # Parameters that have come are those of a round that is open now, or was.
                self._round = max(self._round, action.round + pulled)
                return Committed(self._lease(), pulled)
            case Compute():
                return Computed(self._draw(st.floats(0, 1)), self._draw(st.booleans()))
            case Push() | PushPull():
                shards = st.sets(st.integers(0, 2))
                had, again = self._draw(shards), self._draw(shards)
                return Pushed(self._draw(st.integers(0, 3)), tuple(had), frozenset(again))
            case Initialize():
                return pb.InitializeDone()
            case Evaluate():
                return pb.EvaluateDone()
            case Merge():
                return pb.MergeDone()
            case _:
                return None

    def _lease(self) -> pb.Lease:
        match self._draw(st.integers(0, 12)):
            case 0:
                return pb.Lease(wait=pb.Wait())
            case 1:
                return pb.Lease(evaluate=pb.EvaluateTask())
            case 2:
                return pb.Lease(merge=pb.MergeEvaluation())
            case 3:
                return pb.Lease(initialize=pb.InitializeWork())
            case 4:
                return FINISHED
        if self._sync:
            self._round += self._draw(st.integers(0, 1))
            mine = self._next()
            self._ahead = self._next() if self._draw(st.booleans()) else None
            return work_of(self._round, mine, self._draw(st.booleans()), self._ahead)
        count = self._draw(st.integers(0, 4))
        return pb.Lease(train=pb.TrainTask(batches=[self._next() for _ in range(count)]))

    def _next(self) -> types.Attempt:
        self._attempt += 1
        return attempt(self._draw(st.integers(0, 20)), self._attempt)


def work_of(
    number: int, mine: types.Attempt, pull_next: bool = False, ahead: types.Attempt | None = None
) -> pb.Lease:
    work = pb.RoundWork(round=number, attempt=mine, pull_next=pull_next, ahead=ahead)
    return pb.Lease(round=work)


@pytest.mark.slow
@given(data=st.data(), sync=st.booleans())
@settings(max_examples=150)
def test_nothing_is_pushed_without_a_lease_or_reported_that_a_shard_may_lack(
    data: st.DataObject, sync: bool
) -> None:
    world, witness, actions = World(data.draw, sync), Witness(), conduct()
    action = next(actions)
    ended: Exception | None = None
    for _ in range(150):
        witness.look(action)
        error = world.error(action)
        try:
            if error is None:
                answer = world.answer(action)
                witness.answered(action, answer)
                action = actions.send(answer)
            else:
                witness.failed(action, error)
                action = actions.throw(error)
                assert isinstance(action, Rejoin) == isinstance(error, StaleGeneration)
        except (PsError, Stopped) as end:
            ended = end
            break
    if ended is not None:
        fatal = isinstance(ended, InvalidJob)
        said = ended.coded if isinstance(ended, InvalidJob) else str(ended)
        assert witness.left == Leave(said, fatal)
