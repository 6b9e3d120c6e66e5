"""Leases a worker's work: the current task and, ahead of time, the next one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

from pserver.client.client import ShardClient
from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId
from psrpc.core.plan import Plan
from psrpc.ops.logs import get_logger
from psrpc.v1 import coordinator_pb2 as pb
from worker.loop.router import Router
from worker.loop.row_fetcher import RowFetcher
from worker.loop.session import TICK_S, WorkerSession
from worker.loop.step_times import StepTimes
from worker.protocol.conduct import batch_id
from worker.step.gradient_source import GradientSource

log = get_logger()

POLL_S = 0.02
"""Least time between two requests for work while there is none, in case the coordinator does not
hold a request for a while, as it usually does."""


class Leases:
    """Asks for work in one generation. One thread uses it; a request ahead of time runs on a
    thread of its own."""

    def __init__(self, standing: WorkerSession, source: GradientSource, times: StepTimes) -> None:
        """``source`` learns the batches of the next task as soon as they are known; ``times``
        counts waiting as barrier time."""
        self._standing = standing
        self._source = source
        self._times = times
        self._pool = standing.threads.pool(1, "lease")
        # The lease requested ahead of time, and whether its batches were passed to the source.
        self._following: Future[pb.Lease] | None = None
        self._expected = False

    def close(self, finish: bool) -> None:
        """Ends the requests; with ``finish`` waits for one in flight."""
        self._pool.shutdown(wait=finish)

    def run(self, commit: Callable[[], pb.Lease]) -> Future[pb.Lease]:
        """Runs ``commit`` on the thread of requests ahead of time."""
        return self._pool.submit(commit)

    def get(self, reason: str) -> pb.Lease:
        """Performs :class:`worker.protocol.actions.Lease`; ``reason`` is its ``after``."""
        with self._times.outside("barrier"):
            return self._await(reason) if reason else self._standing.lease()

    def _await(self, reason: str) -> pb.Lease:
        with self._standing.waits.on(reason):
            while True:
                self._standing.pause(POLL_S)
                lease = self._standing.lease()
                if lease.WhichOneof("work") != "wait":
                    return lease
                self._standing.waits.on(lease.wait.reason)

    def ask_ahead(self) -> None:
        """Starts to request the next task; :meth:`take` follows."""
        self._following = self._pool.submit(self._standing.lease)
        self._expected = False

    def take(self) -> pb.Lease:
        """Waits for the lease that :meth:`ask_ahead` requested."""
        following = self._following
        assert following is not None  # ask_ahead comes first
        if not following.done():
            # The request left before the last batches were done. Report them now, since whether
            # there is more work may depend on them.
            self._standing.flush()
        waits = self._standing.waits
        with self._times.outside("barrier"), waits.on("work from the coordinator"):
            while not following.done():
                with suppress(TimeoutError):
                    following.exception(TICK_S)
                self._standing.check()
        self.look_ahead()
        self._following = None
        return following.result()

    def look_ahead(self) -> None:
        """Passes the batches of the next task to the source once they are known, to read ahead."""
        following = self._following
        if following is None or self._expected or not following.done():
            return
        self._expected = True
        if following.exception() is None:
            batches = following.result().train.batches
            self._source.expect([batch_id(attempt.batch) for attempt in batches])

    def first_of_next(self) -> BatchId | None:
        """Returns the first batch of the next task, if known."""
        following = self._following
        if following is None or not following.done():
            return None
        if following.exception() is not None or not following.result().train.batches:
            return None
        return batch_id(following.result().train.batches[0].batch)


@dataclass(frozen=True, eq=False)
class Joined:
    """The resources of one generation. One thread uses it.

    Attributes:
        shards: with the workspace that tensors go through.
        leases: of work.
        rows: of embedding tables.
    """

    shards: Router
    leases: Leases
    rows: RowFetcher
    _held: ExitStack

    def close(self, *, finish: bool) -> None:
        """Releases everything; with ``finish`` waits for a lease request in flight, so that the
        next request does not overtake it."""
        self.leases.close(finish)
        self._held.close()


def join(
    cluster: pb.GetClusterResponse,
    source: GradientSource,
    standing: WorkerSession,
    times: StepTimes,
    *,
    shm: bool,
    prefetch_rows: bool,
    connect: Callable[..., ShardClient],
) -> Joined:
    """Prepares work in ``cluster``, once all its shards answer; for the arguments see
    :class:`worker.loop.performer.Performer`."""
    plan = Plan.from_json(cluster.plan)
    rows_nbytes = source.rows_nbytes(plan) if plan.tables else 0
    with ExitStack() as stack:
        # A new workspace each time, since a shard given up may still use the last one.
        workspace = stack.enter_context(closing(Workspace(plan, source.wire, shm, rows_nbytes)))
        if workspace.why:
            log.info("tensors go over the network", why=f"shared memory: {workspace.why}")
        source.prepare(plan, workspace)
        shards = stack.enter_context(
            Router(cluster, plan, standing, workspace, source.waiting, connect)
        )
        shards.reach()
        leases = Leases(standing, source, times)
        rows = stack.enter_context(
            RowFetcher(
                source,
                shards,
                tables=bool(plan.tables),
                prefetch=prefetch_rows,
                threads=standing.threads,
            )
        )
        return Joined(shards, leases, rows, stack.pop_all())
