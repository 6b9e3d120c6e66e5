"""Decides what a worker does with micro-batches of the open round. Pure."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Any

from psrpc.core.batch import BatchId
from psrpc.core.errors import PsError, RoundPassed, StaleGeneration
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.wire.commands import from_batch
from worker.protocol import actions as does
from worker.protocol.actions import Conduct, Leased
from worker.protocol.done import DoneBatch, Stopped


class MicroBatches:
    """Sync: runs micro-batches of rounds. The answer to a commit is the next lease. If the last
    lease announced another micro-batch of the same round, the worker computes it during the commit;
    one for another device, at the same time."""

    def __init__(self, devices: int = 1) -> None:
        self.devices = devices
        """The number of micro-batches that this worker computes at once."""
        self._next = NextBatch()
        self.pulled: int | None = None
        """The round of the parameters at hand, if known."""
        self._expected: tuple[BatchId, ...] | None = None
        self._kept: dict[int, does.Computed] = {}
        """Attempts that are computed and not yet pushed, by number."""
        self._kept_round = 0
        """The round whose parameters they were computed from."""

    def expect_nothing(self) -> None:
        """Forgets the batch announced last, because others have been announced since."""
        self._expected = None

    def run(self, work: pb.RoundWork) -> Leased:
        """Runs ``work`` and following ones; returns the first lease of another kind."""
        while True:
            lease: pb.Lease = yield from self._run_micro_batch(work)
            work = lease.round
            same = work.newest or work.round == self._kept_round
            if self._kept and not (same and work.attempt.attempt in self._kept):
                # No shard will use the gradients that were computed ahead.
                self._kept.clear()
                yield does.TakeBack()
            if lease.WhichOneof("work") != "round":
                return lease

    def _run_micro_batch(self, work: pb.RoundWork) -> Leased:
        batch, attempt = from_batch(work.attempt.batch), work.attempt.attempt
        ahead = from_batch(work.ahead.batch) if work.HasField("ahead") else None
        lease: pb.Lease
        several = self.devices > 1
        try:
            if attempt not in self._kept:
                yield from self._compute(work)
            computed = self._kept.pop(attempt)
            # Other workers may still compute this round: time to read ahead.
            guess = self._next.after(batch)
            following = ahead or guess
            if following is not None:
                yield from self._expect(following)
            pushed: does.Pushed = yield does.Push(
                batch, attempt, not computed.finite, work.attempt.grant
            )
        except RoundPassed:
            self._kept.clear()
            yield does.TakeBack()
            lease = yield does.Lease()
            return lease
        # A shard that had the batch has applied the round with another attempt; so will the others.
        of = batch if several else None
        yield does.TakeBack(of) if pushed.had else does.Settle(batch=of)
        done = DoneBatch(
            batch,
            attempt,
            computed.loss,
            pushed.staleness,
            skipped=not computed.finite,
            receipts=pushed.receipts,
            not_finite=computed.not_finite,
        )
        if ahead is not None:
            lease = yield from self._commit_and_compute(work, done, ahead)
            return lease
        committed: does.Committed = yield does.Commit(self._kept_round, done, work.pull_next)
        if committed.pulled:
            self.pulled = work.round + 1
        return committed.lease

    def _compute(self, work: pb.RoundWork) -> Conduct:
        """Computes the micro-batch of ``work`` and, at once, those for the other devices."""
        attempts = [work.attempt, *work.beside[: self.devices - 1]]
        batches = tuple(from_batch(attempt.batch) for attempt in attempts)
        yield from self._expect(*batches)
        yield from self._receive(work, batches[0])
        results = yield from computed_at_once(batches)
        self._kept_round = work.round
        for attempt, computed in zip(attempts, results, strict=True):
            self._kept[attempt.attempt] = computed

    def _commit_and_compute(self, work: pb.RoundWork, done: DoneBatch, ahead: BatchId) -> Leased:
        """Commits ``done`` and meanwhile computes the batch ``ahead``, of the same round."""
        yield does.BeginCommit(work.round, done)
        try:
            computed: does.Computed = yield does.Compute(ahead)
            self._kept[work.ahead.attempt] = computed
        except RoundPassed:
            yield does.TakeBack()
        except (PsError, Stopped) as error:
            # The coordinator must not hear that the worker leaves before it has the commit.
            if not isinstance(error, StaleGeneration):
                with suppress(PsError, Stopped):
                    yield does.TakeCommit()
            raise
        lease: pb.Lease = yield does.TakeCommit()
        return lease

    def _expect(self, *batches: BatchId) -> Conduct:
        if batches != self._expected:
            self._expected = batches
            yield does.Expect(batches, instead=True)

    def _receive(self, work: pb.RoundWork, batch: BatchId) -> Conduct:
        """Pulls the parameters of the round, unless this worker has them. With backup workers they
        may be newer."""
        if self.pulled != work.round:
            decision = work.decision if work.HasField("decision") else None
            yield does.Pull(None if work.newest else work.round, decision, batch)
            self.pulled = work.round


def computed_at_once(
    batches: Sequence[BatchId], following: BatchId | None = None, *, add: bool = False
) -> Generator[does.Action, Any, tuple[does.Computed, ...]]:
    """Computes ``batches`` at once, each on a device of its own, and returns their results; for
    ``following`` and ``add`` see :class:`worker.protocol.actions.Compute`."""
    first, *beside = batches
    answer = yield does.Compute(first, following, tuple(beside), add)
    return tuple(answer) if beside else (answer,)


class NextBatch:
    """Guesses this worker's next micro-batch: the distance from the last batch to the current one,
    once more. Correct for a single worker, and for several of the same speed. Pure.

    A wrong guess costs reading a batch, so after one it returns None until a guess would have been
    right.
    """

    def __init__(self) -> None:
        self._last: BatchId | None = None
        self._guess: BatchId | None = None

    def after(self, batch: BatchId) -> BatchId | None:
        """Returns the batch to prepare during the work on ``batch``, or None."""
        trusted = batch == self._guess
        last, self._last = self._last, batch
        self._guess = None
        if last is not None and last.epoch == batch.epoch and batch.first > last.first:
            self._guess = BatchId(batch.epoch, 2 * batch.first - last.first, batch.count)
        return self._guess if trusted else None
