"""What a worker has of the generation that it has joined."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass

from pserver.client.client import ShardClient
from pserver.transport.workspace import Workspace
from psrpc.core.plan import Plan
from psrpc.ops.logs import get_logger
from psrpc.v1 import coordinator_pb2 as pb
from worker.loop.leases import Leases
from worker.loop.router import Router
from worker.loop.row_fetcher import RowFetcher
from worker.loop.session import Standing
from worker.loop.step_times import StepTimes
from worker.step.gradient_source import GradientSource

log = get_logger()


@dataclass(frozen=True, eq=False)
class Joined:
    """Connections, memory and a thread that asks for work ahead of time. One thread uses it.

    Attributes:
        shards: with the workspace that tensors go through.
        leases: the work.
        rows: of embedding tables.
    """

    shards: Router
    leases: Leases
    rows: RowFetcher
    _held: ExitStack

    def close(self, *, finish: bool) -> None:
        """Gives everything up; with ``finish`` a request for work that is under way has ended then,
        so that the next does not overtake it."""
        self.leases.close(finish)
        self._held.close()


def join(
    cluster: pb.GetClusterResponse,
    source: GradientSource,
    standing: Standing,
    times: StepTimes,
    *,
    shm: bool,
    prefetch_rows: bool,
    connect: Callable[..., ShardClient],
) -> Joined:
    """Gets ready to work in ``cluster``, once all of its shards answer; see
    :class:`worker.loop.performer.Performer`."""
    plan = Plan.from_json(cluster.plan)
    rows_nbytes = source.rows_nbytes(plan) if plan.tables else 0
    with ExitStack() as stack:
        # Anew each time: a shard that was given up may still use the last one.
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
