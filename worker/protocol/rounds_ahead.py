"""Decides what a worker does with micro-batches of rounds that are decided ahead. Pure."""

from __future__ import annotations

from psrpc.core.errors import RoundPassed
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.wire.commands import from_batch
from worker.protocol import actions as does
from worker.protocol.actions import Conduct, Leased
from worker.protocol.done import DoneBatch
from worker.protocol.micro_batches import MicroBatches


class RoundsAheadRunner:
    """Runs tasks of micro-batches whose rounds are decided already: no commit follows a push, and
    one exchange with the shards stages a gradient and brings the next round.

    A worker uses one object for all generations that it joins. If a new generation interrupts a
    push, the round may contain the attempt all the same, so this object remembers its result.
    """

    def __init__(self) -> None:
        self._last: tuple[int, does.Computed] | None = None
        """The attempt that was computed last, with its result."""

    def run(self, task: pb.RoundsTask, at: MicroBatches) -> Leased:
        """Runs ``task`` and following ones; returns the first lease of another kind. ``at.pulled``
        is the round of the parameters at hand.

        Requests the next task when half of the current one is done.
        """
        batches = tuple(from_batch(each.attempt.batch) for each in task.attempts)
        yield does.Expect(batches, instead=True)
        while True:
            asked = False
            for index, planned in enumerate(task.attempts):
                if not asked and 2 * index >= len(task.attempts) - 1:
                    asked = True
                    yield does.LeaseAhead()
                rest = task.attempts[index + 1 :]
                following = rest[0] if rest else None
                yield from self._run_one(planned, following, at)
            if not asked:
                yield does.LeaseAhead()
            lease: pb.Lease = yield does.TakeLease()
            if lease.WhichOneof("work") != "rounds":
                at.expect_nothing()
                return lease
            task = lease.rounds

    def _run_one(
        self, planned: pb.AttemptAhead, following: pb.AttemptAhead | None, at: MicroBatches
    ) -> Conduct:
        attempt = planned.attempt
        batch, number, grant = from_batch(attempt.batch), attempt.attempt, attempt.grant
        after = None if following is None else from_batch(following.attempt.batch)
        pushed: does.Pushed
        try:
            if at.pulled != planned.round:
                at.pulled = None
                yield does.Pull(planned.round, batch=batch, ahead=True)
                at.pulled = planned.round
            ends = following is None or following.round != planned.round
            # Rows that are received during the computation are of this round, so they are of use
            # only to a batch of the same round.
            computed: does.Computed = yield does.Compute(batch, None if ends else after)
            self._last = number, computed
            skip = not computed.finite
            if following is None or not ends:
                pushed = yield does.Push(batch, number, skip, grant, ahead=True)
            else:
                at.pulled = None
                pushed = yield does.PushNext(batch, number, following.round, after, skip, grant)
                at.pulled = following.round
        except RoundPassed:
            # The round has this attempt, which was pushed before the worker had to join anew. Push
            # without the gradient: the shards need it no more, but return their receipts.
            yield does.TakeBack()
            computed = self._result_of(number)
            pushed = yield does.Push(batch, number, True, grant, ahead=True)
        if following is None:
            # No pull follows that would tell the shards. Tell them before the report: after it,
            # the coordinator no longer waits for this worker.
            yield does.Confirm()
        unused = tuple(shard for shard in pushed.had if shard not in pushed.asked_again)
        yield does.Settle(unused)
        yield does.Done(
            DoneBatch(
                batch,
                number,
                computed.loss,
                skipped=not computed.finite,
                receipts=pushed.receipts,
                not_finite=computed.not_finite,
            )
        )

    def _result_of(self, number: int) -> does.Computed:
        assert self._last is not None
        computed, result = self._last
        assert computed == number, "only its own push lets a round pass"
        return result
