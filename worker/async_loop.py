"""Asynchronous training: every gradient is applied as it comes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from psrpc.batch import BatchId
from psrpc.errors import StaleGeneration
from psrpc.logs import get_logger
from psrpc.v1 import coordinator_pb2 as pb
from worker.compute import Compute, batch_id
from worker.done import DoneBatch
from worker.router import Router
from worker.standing import TICK_S, Standing
from worker.step_times import StepTimes

log = get_logger()


class AsyncLoop:
    """Runs train tasks; asks for the next one while the present one is half done."""

    def __init__(
        self, compute: Compute, router: Router, standing: Standing, times: StepTimes
    ) -> None:
        self._compute = compute
        self._router = router
        self._standing = standing
        self._times = times
        self._ahead = ThreadPoolExecutor(1, "lease")

    def __enter__(self) -> AsyncLoop:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A request that is still under way brings what nobody wants any more. It ends in seconds;
        # where this worker goes on, its next request must not overtake it.
        self._ahead.shutdown(wait=isinstance(error, StaleGeneration))

    def run(self, task: pb.TrainTask) -> pb.Lease:
        """Runs ``task`` and those that follow it; returns the first lease of another kind."""
        self._pull()
        self._expect(task)
        while True:
            following = self._run_task(task)
            if not following.done():
                # The request went out before the last batches were done: report them now, since
                # whether there is more work may depend on them.
                self._standing.flush()
            lease = self._result(following)
            if lease.WhichOneof("work") != "train":
                return lease
            task = lease.train

    def _run_task(self, task: pb.TrainTask) -> Future[pb.Lease]:
        """Runs the batches; returns the request for the next lease."""
        following: Future[pb.Lease] | None = None
        expected = False
        for index, attempt in enumerate(task.batches):
            if following is None and 2 * index >= len(task.batches) - 1:
                following = self._ahead.submit(self._standing.lease)
            self._run_batch(batch_id(attempt.batch), attempt.attempt)
            if following is not None and not expected and following.done():
                expected = True
                self._expect_following(following)
        following = following or self._ahead.submit(self._standing.lease)
        if not expected:
            following.add_done_callback(self._expect_following)
        return following

    def _run_batch(self, batch: BatchId, attempt: int) -> None:
        times = self._times
        times.begin()
        given = self._compute.read(batch)
        times.took("data")
        result = self._compute.gradient(batch, given)
        times.took("compute")
        if not result.finite:
            log.warning("the gradient is NaN or infinite; the batch is skipped", batch=str(batch))
        pushed = self._router.push_pull(
            batch,
            attempt,
            result.gradients if result.finite else None,
            self._compute.spare.arrays,
        )
        self._compute.settle(self._router.unused(pushed))
        self._compute.swap()
        times.took("push_pull")
        times.end()
        staleness = max(push.staleness for push in pushed)
        self._standing.done(
            DoneBatch(batch, attempt, result.loss, staleness, skipped=not result.finite)
        )

    def _pull(self) -> None:
        self._router.pull(None, self._compute.spare.arrays)
        self._compute.swap()

    def _expect_following(self, following: Future[pb.Lease]) -> None:
        if following.exception() is None:
            self._expect(following.result().train)

    def _expect(self, task: pb.TrainTask) -> None:
        self._compute.expect(batch_id(attempt.batch) for attempt in task.batches)

    def _result(self, following: Future[pb.Lease]) -> pb.Lease:
        with self._standing.waits.on("work from the coordinator"):
            while True:
                try:
                    return following.result(TICK_S)
                except TimeoutError:
                    if following.done():
                        raise
                    self._standing.check()
