"""The resources of a generation that a worker has joined: its shards, leases and table rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass

from pserver.client.client import ShardClient
from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId
from psrpc.core.plan import Plan
from psrpc.ops.logs import get_logger
from psrpc.ops.threads import THREADS, Threads
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.wire.commands import from_batch
from worker.embedding.row_sets import ReceivedRows
from worker.loop.router import Router
from worker.loop.session import TICK_S, WorkerSession
from worker.loop.step_times import StepTimes
from worker.step.gradient_source import GradientSource

log = get_logger()

POLL_S = 0.02
"""Least seconds between two requests for work while there is none. Usually the coordinator holds
such a request for a while; this limits the rate of requests if it answers at once."""


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
        """Runs ``commit`` on the thread that requests leases ahead of time."""
        return self._pool.submit(commit)

    def commit_ahead(self, commit: Callable[[], pb.Lease]) -> None:
        """Starts to run ``commit``; :meth:`committed` follows."""
        self._following = self._pool.submit(commit)

    def committed(self) -> pb.Lease:
        """Waits for the end of :meth:`commit_ahead` and returns the lease that it brought."""
        following, self._following = self._following, None
        assert following is not None  # commit_ahead comes first
        with self._standing.waits.on("the answer to a commit"):
            return following.result()

    def get(self, reason: str) -> pb.Lease:
        """Performs :class:`worker.protocol.actions.Lease`; ``reason`` is its ``after``."""
        self._times.at(pb.WorkerPosition.PHASE_WAITING)
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
        self._times.at(pb.WorkerPosition.PHASE_WAITING)
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
            lease = following.result()
            attempts = [*lease.train.batches, *(each.attempt for each in lease.rounds.attempts)]
            self._source.expect([from_batch(attempt.batch) for attempt in attempts])

    def first_of_next(self) -> BatchId | None:
        """Returns the first batch of the next task, if known."""
        following = self._following
        if following is None or not following.done():
            return None
        if following.exception() is not None or not following.result().train.batches:
            return None
        return from_batch(following.result().train.batches[0].batch)


class RowFetcher:
    """Fetches rows for the batches of one generation. One thread uses it.

    If the ids of the next batch are known at an exchange with the shards, that exchange also brings
    its rows, see :meth:`ahead`. Otherwise an additional pull brings the rows before the batch is
    computed. Does nothing if the plan has no tables.
    """

    def __init__(
        self,
        source: GradientSource,
        shards: Router,
        *,
        tables: bool,
        prefetch: bool,
        threads: Threads = THREADS,
    ) -> None:
        """``tables`` says whether the plan has any. With ``prefetch``, receives the next batch's
        rows while a batch is computed."""
        self._source = source
        self._shards = shards
        self.tables = tables
        self._kept: tuple[BatchId, ReceivedRows] | None = None
        self._pool = threads.pool(1, "rows") if tables and prefetch else None

    def __enter__(self) -> RowFetcher:
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def drop(self) -> None:
        """Drops rows received ahead, because newer ones are available."""
        self._kept = None

    def ahead(self, batch: BatchId | None) -> ReceivedRows | None:
        """Returns where to receive the rows of the coming ``batch``. None if it needs none, if
        they are here already, or if its data is not read yet: an exchange must not wait for data.
        """
        if batch is None or not self.tables or self._kept is not None:
            return None
        given = self._source.ahead(batch)
        return None if given is None else self._source.place(given)

    def came(self, batch: BatchId | None, rows: ReceivedRows | None) -> None:
        """Keeps ``rows``, which :meth:`ahead` returned for ``batch`` and an exchange has filled."""
        if batch is not None and rows is not None:
            self._kept = batch, rows

    def of(self, batch: BatchId, given: object, number: int | None) -> ReceivedRows | None:
        """Returns the rows of ``batch``, whose data is ``given``; None if it needs none. Rows not
        received ahead are pulled now, from round ``number`` or (None) the newest.

        Raises:
            RoundPassed: the round is over. For other errors see :class:`worker.loop.router.Router`.
        """
        if not self.tables:
            return None
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] == batch:
            return kept[1]
        rows = self._source.place(given)
        if rows is not None:
            self._shards.pull(number, None, rows=rows)
        return rows

    @contextmanager
    def prefetching(self, following: BatchId | None) -> Iterator[None]:
        """Receives the newest rows of the batch ``following`` while the ``with`` block runs, if
        prefetching is on. The block must not use the router."""
        rows = None if self._pool is None else self.ahead(following)
        if rows is None or self._pool is None:
            yield
            return
        fetched = self._pool.submit(self._shards.pull, None, None, rows=rows)
        try:
            yield
        finally:
            # Wait for the pull to end, since only then may this thread use the router again.
            fetched.exception()
        fetched.result()
        self.came(following, rows)


@dataclass(frozen=True, eq=False)
class Joined:
    """The resources of one generation. One thread uses it.

    Attributes:
        shards: exchanges tensors with the shards, through its workspace.
        leases: requests work.
        rows: fetches rows of embedding tables.
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


@dataclass(frozen=True, eq=False)
class Joining:
    """Prepares the work in a generation; for the fields see
    :class:`worker.loop.performer.Performer`."""

    source: GradientSource
    standing: WorkerSession
    times: StepTimes
    shm: bool
    prefetch_rows: bool
    connect: Callable[..., ShardClient]

    def join(self, cluster: pb.GetClusterResponse) -> Joined:
        """Returns once all shards of ``cluster`` answer."""
        source, standing = self.source, self.standing
        plan = Plan.from_json(cluster.plan)
        rows_nbytes = source.rows_nbytes(plan) if plan.tables else 0
        with ExitStack() as stack:
            # A new workspace each time, since a shard that did not answer may still use the last.
            workspace = stack.enter_context(
                closing(Workspace(plan, source.wire, self.shm, rows_nbytes))
            )
            if workspace.why:
                log.info("tensors go over the network", why=f"shared memory: {workspace.why}")
            source.prepare(plan, workspace)
            shards = stack.enter_context(
                Router(cluster, plan, standing, workspace, source.waiting, self.connect)
            )
            shards.reach()
            rows = RowFetcher(
                source,
                shards,
                tables=bool(plan.tables),
                prefetch=self.prefetch_rows,
                threads=standing.threads,
            )
            stack.enter_context(rows)
            return Joined(shards, Leases(standing, source, self.times), rows, stack.pop_all())
