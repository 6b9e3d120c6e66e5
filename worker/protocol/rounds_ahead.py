"""Decides what a worker does with micro-batches of rounds that are decided ahead. Pure.

With ``exact=False`` a worker adds up the gradients of its micro-batches of a round and pushes one
sum. It may, since the decision names exactly these attempts and never changes.
"""

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

MOST_SUMMED = 64
"""Most micro-batches of a sum; see :data:`pserver.engine.push_checks.MAX_SUMMED`."""


class RoundsAheadRunner:
    """Runs tasks of micro-batches whose rounds are decided already: no commit follows a push, and
    one exchange with the shards stages a gradient and brings the next round.

    A worker uses one object for all generations that it joins. If a new generation interrupts a
    push, the round may contain the attempt all the same, so this object remembers its result.
    """

    def __init__(self, *, exact: bool = True) -> None:
        self._exact = exact
        self._last: dict[int, does.Computed] = {}
        """The attempts that were computed last, at once or for one sum, with their results."""

    def run(self, task: pb.RoundsTask, at: MicroBatches) -> Leased:
        """Runs ``task`` and following ones; returns the first lease of another kind. ``at.pulled``
        is the round of the parameters at hand.

        Requests the next task when half of the current one is done.
        """
        batches = tuple(from_batch(each.attempt.batch) for each in task.attempts)
        yield does.Expect(batches, instead=True)
        while True:
            asked = False
            for start, end in _groups(task, at.devices if self._exact else MOST_SUMMED):
                if not asked and 2 * (end - 1) >= len(task.attempts) - 1:
                    asked = True
                    yield does.LeaseAhead()
                rest = task.attempts[end:]
                following = rest[0] if rest else None
                run = self._run_group if self._exact or end - start == 1 else self._run_sum
                yield from run(task.attempts[start:end], following, at)
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
            yield _done(batch, attempt, computed, pushed)

    def _run_sum(
        self, summed: Sequence[pb.AttemptAhead], following: pb.AttemptAhead | None, at: MicroBatches
    ) -> Conduct:
        """Computes the attempts ``summed``, which are of one round, adds up their gradients, and
        pushes the sum under all of them. If it is refused, computes and pushes them one by one."""
        number = summed[0].round
        batches = [from_batch(each.attempt.batch) for each in summed]
        ends = following is None or following.round != number
        after = None if following is None else from_batch(following.attempt.batch)
        computed: dict[int, does.Computed] = {}
        passed = False
        groups = [
            (start, min(start + at.devices, len(summed)))
            for start in range(0, len(summed), at.devices)
        ]
        try:
            if at.pulled != number:
                at.pulled = None
                yield does.Pull(number, batch=batches[0], ahead=True)
                at.pulled = number
            for start, end in groups:
                beside = batches[start:end]
                later = batches[end] if end < len(batches) else None if ends else after
                results = yield from computed_at_once(beside, later, add=True)
                attempts = (each.attempt.attempt for each in summed[start:end])
                computed.update(zip(attempts, results, strict=True))
            self._last = computed
        except RoundPassed:
            passed = True
        pushed: dict[int, does.Pushed] = {}
        if not passed:
            try:
                yield from self._push_sum(summed, following, at, pushed)
            except RoundPassed:
                passed = True
        if any(each.one_by_one for each in pushed.values()):
            yield does.TakeBack()
            for start, end in groups:
                then = summed[end] if end < len(summed) else following
                yield from self._run_group(summed[start:end], then, at)
            return
        for each, batch in zip(summed, batches, strict=True):
            attempt = each.attempt.attempt
            if attempt not in pushed:
                pushed[attempt] = yield from self._push_nothing(batch, attempt, each.attempt.grant)
        if following is None:
            yield does.Confirm()
        for each, batch in zip(summed, batches, strict=True):
            attempt = each.attempt.attempt
            # There is no compression, and so no residual to restore.
            yield does.Settle(batch=batch)
            yield _done(batch, attempt, self._result_of(attempt), pushed[attempt])

    def _push_sum(
        self,
        summed: Sequence[pb.AttemptAhead],
        following: pb.AttemptAhead | None,
        at: MicroBatches,
        pushed: dict[int, does.Pushed],
    ) -> Conduct:
        """Pushes the sum of ``summed`` under the attempt of the highest batch, and those whose
        gradient is not finite by themselves, before it. Notes the answers in ``pushed``."""
        attempts = [each.attempt for each in summed]
        attempts.sort(key=lambda one: (self._result_of(one.attempt).finite, from_batch(one.batch)))
        *others, last = attempts
        beside = tuple(one for one in others if self._result_of(one.attempt).finite)
        for one in others[: len(others) - len(beside)]:
            batch = from_batch(one.batch)
            pushed[one.attempt] = yield does.Push(batch, one.attempt, True, one.grant, ahead=True)
        batch, skip = from_batch(last.batch), not self._result_of(last.attempt).finite
        ends = following is not None and following.round != summed[0].round
        answer: does.Pushed | tuple[does.Pushed, ...]
        if following is not None and ends:
            at.pulled = None
            after = from_batch(following.attempt.batch)
            answer = yield does.PushNext(
                batch, last.attempt, following.round, after, skip, last.grant, beside
            )
        else:
            answer = yield does.Push(
                batch, last.attempt, skip, last.grant, ahead=True, summed=beside
            )
        answers = answer if isinstance(answer, tuple) else (answer,)
        pushed.update(zip([one.attempt for one in (last, *beside)], answers, strict=True))
        if following is not None and ends:
            refused = any(each.one_by_one for each in answers)
            at.pulled = summed[0].round if refused else following.round

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


def _done(batch: BatchId, attempt: int, computed: does.Computed, pushed: does.Pushed) -> does.Done:
    return does.Done(
        DoneBatch(
            batch,
            attempt,
            computed.loss,
            skipped=not computed.finite,
            receipts=pushed.receipts,
            not_finite=computed.not_finite,
        )
    )


def _groups(task: pb.RoundsTask, most: int) -> Iterator[tuple[int, int]]:
    """Yields the bounds of the attempts of ``task`` that are computed at once, or summed: those of
    one round, at most so many."""
    start = 0
    while start < len(task.attempts):
        end = start + 1
        last = min(len(task.attempts), start + most)
        while end < last and task.attempts[end].round == task.attempts[start].round:
            end += 1
        yield start, end
        start = end
