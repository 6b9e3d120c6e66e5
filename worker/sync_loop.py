"""Synchronous training: the mean of a round's micro-batches is applied once all are there."""

from __future__ import annotations

from psrpc.batch import BatchId
from psrpc.errors import RoundPassed
from psrpc.logs import get_logger
from psrpc.v1 import coordinator_pb2 as pb
from worker.compute import Compute, batch_id
from worker.done import DoneBatch
from worker.next_batch import NextBatch
from worker.router import Router
from worker.standing import Standing
from worker.step_times import StepTimes

log = get_logger()


class SyncLoop:
    """Runs micro-batches of rounds. The coordinator's answer to a commit is the next lease."""

    def __init__(
        self, compute: Compute, router: Router, standing: Standing, times: StepTimes
    ) -> None:
        self._compute = compute
        self._router = router
        self._standing = standing
        self._times = times
        self._next = NextBatch()
        self._held: int | None = None
        self._expected: BatchId | None = None

    def run(self, work: pb.RoundWork) -> pb.Lease:
        """Runs ``work`` and what follows it; returns the first lease of another kind, which may
        be to wait."""
        while True:
            lease = self._run_micro_batch(work)
            if lease.WhichOneof("work") != "round":
                return lease
            work = lease.round

    def _run_micro_batch(self, work: pb.RoundWork) -> pb.Lease:
        batch, attempt = batch_id(work.attempt.batch), work.attempt.attempt
        times = self._times
        times.begin()
        self._expect(batch)
        try:
            self._receive(work)
            times.took("pull")
            given = self._compute.read(batch)
            times.took("data")
            result = self._compute.gradient(batch, given)
            times.took("compute")
            if not result.finite:
                log.warning(
                    "the gradient is NaN or infinite; the batch is skipped", batch=str(batch)
                )
            # Others may still be computing this round: time to read ahead.
            guess = self._next.after(batch)
            if guess is not None:
                self._expect(guess)
            pushed = self._router.push(batch, attempt, result.gradients if result.finite else None)
            times.took("push")
        except RoundPassed as passed:
            self._compute.take_back()
            log.info("the round went on without this micro-batch", reason=str(passed))
            return self._standing.lease()
        if any(push.outcome == "already_applied" for push in pushed):
            # A shard has applied the round with another attempt, and the others will.
            self._compute.take_back()
        self._compute.settle()
        done = DoneBatch(batch, attempt, result.loss, skipped=not result.finite)
        with self._standing.waits.on(f"the other micro-batches of round {work.round}"):
            lease = self._standing.commit(work.round, done)
        times.took("commit")
        times.end()
        return lease

    def _expect(self, batch: BatchId) -> None:
        if batch != self._expected:
            self._compute.forget()
            self._compute.expect([batch])
            self._expected = batch

    def _receive(self, work: pb.RoundWork) -> None:
        """Holds the parameters of the round from now on."""
        if self._held == work.round:
            return
        decision = work.decision if work.HasField("decision") else None
        # The spare set holds anything until the pull has succeeded.
        self._router.pull(work.round, self._compute.spare.arrays, decision)
        self._compute.swap()
        self._held = work.round
