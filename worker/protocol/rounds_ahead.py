"""Decides what a worker does with micro-batches of rounds that are decided ahead. Pure."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

from psrpc.core.batch import BatchId
from psrpc.core.errors import RoundPassed
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.wire.commands import from_batch
from worker.protocol import actions as does
from worker.protocol.actions import Conduct, Leased
from worker.protocol.done import DoneBatch
from worker.protocol.micro_batches import MicroBatches, computed_at_once


class RoundsAheadRunner:
    """Runs tasks of micro-batches whose rounds are decided already: no commit follows a push, and
    one exchange with the shards stages a gradient and brings the next round.

    A worker uses one object for all generations that it joins. If a new generation interrupts a
    push, the round may contain the attempt all the same, so this object remembers its result.
    """

    def __init__(self) -> None:
        self._last: dict[int, does.Computed] = {}
        """The attempts that were computed last, at once, with their results."""

    def run(self, task: pb.RoundsTask, at: MicroBatches) -> Leased:
        """Runs ``task`` and following ones; returns the first lease of another kind. ``at.pulled``
        is the round of the parameters at hand.

        Requests the next task when half of the current one is done.
        """
        batches = tuple(from_batch(each.attempt.batch) for each in task.attempts)
        yield does.Expect(batches, instead=True)
        while True:
            asked = False
            for start, end in _groups(task, at.devices):
                if not asked and 2 * (end - 1) >= len(task.attempts) - 1:
                    asked = True
                    yield does.LeaseAhead()
                rest = task.attempts[end:]
                following = rest[0] if rest else None
                yield from self._run_group(task.attempts[start:end], following, at)
            if not asked:
                yield does.LeaseAhead()
            lease: pb.Lease = yield does.TakeLease()
            if lease.WhichOneof("work") != "rounds":
                at.expect_nothing()
                return lease
            task = lease.rounds

    def _run_group(
        self, group: Sequence[pb.AttemptAhead], following: pb.AttemptAhead | None, at: MicroBatches
    ) -> Conduct:
        """Computes the attempts of ``group``, which are of one round, at once, and pushes each."""
        number = group[0].round
        batches = [from_batch(each.attempt.batch) for each in group]
        # Rows that are received during the computation are of this round, so they are of use only
        # to a batch of the same round.
        ends = following is None or following.round != number
        after = None if following is None else from_batch(following.attempt.batch)
        passed = False
        try:
            if at.pulled != number:
                at.pulled = None
                yield does.Pull(number, batch=batches[0], ahead=True)
                at.pulled = number
            results = yield from computed_at_once(batches, None if ends else after)
            numbers = (each.attempt.attempt for each in group)
            self._last = dict(zip(numbers, results, strict=True))
        except RoundPassed:
            passed = True
        pushed: does.Pushed
        for each, batch in zip(group, batches, strict=True):
            attempt, grant = each.attempt.attempt, each.attempt.grant
            computed = self._result_of(attempt)
            skip, last = not computed.finite, each is group[-1]
            try:
                if passed:
                    pushed = yield from self._push_nothing(batch, attempt, grant)
                elif following is None or not (ends and last):
                    pushed = yield does.Push(batch, attempt, skip, grant, ahead=True)
                else:
                    at.pulled = None
                    later = following.round
                    pushed = yield does.PushNext(batch, attempt, later, after, skip, grant)
                    at.pulled = later
            except RoundPassed:
                passed = True
                pushed = yield from self._push_nothing(batch, attempt, grant)
            if following is None and last:
                # No pull follows that would tell the shards. Tell them before the report: after
                # it, the coordinator no longer waits for this worker.
                yield does.Confirm()
            unused = tuple(shard for shard in pushed.had if shard not in pushed.asked_again)
            yield does.Settle(unused, None if len(group) == 1 else batch)
            yield does.Done(
                DoneBatch(
                    batch,
                    attempt,
                    computed.loss,
                    skipped=not computed.finite,
                    receipts=pushed.receipts,
                    not_finite=computed.not_finite,
                )
            )

    def _push_nothing(
        self, batch: BatchId, attempt: int, grant: bytes
    ) -> Generator[does.Action, Any, does.Pushed]:
        """Pushes an attempt without its gradient. Its round has it, since it was pushed before the
        worker had to join anew; the shards need it no more, but return their receipts."""
        yield does.TakeBack()
        pushed: does.Pushed = yield does.Push(batch, attempt, True, grant, ahead=True)
        return pushed

    def _result_of(self, attempt: int) -> does.Computed:
        assert attempt in self._last, "only its own push lets a round pass"
        return self._last[attempt]


def _groups(task: pb.RoundsTask, devices: int) -> Iterator[tuple[int, int]]:
    """Yields the bounds of the attempts of ``task`` that are computed at once: those of one round,
    at most one per device."""
    start = 0
    while start < len(task.attempts):
        end = start + 1
        most = min(len(task.attempts), start + devices)
        while end < most and task.attempts[end].round == task.attempts[start].round:
            end += 1
        yield start, end
        start = end
