"""Real shards with the numpy engine, served from this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from coordinator.client.client import CoordinatorClient
from pserver.client.requests import GradientPush
from pserver.core.fence import ShardIdentity
from pserver.engine.engine import ShardEngine
from pserver.server.server import ShardServer
from pserver.updates.engine import EngineKind
from pserver.updates.factory import make_engine
from psrpc.core.batch import BatchId
from psrpc.core.encoding import Gradient
from psrpc.core.plan import Plan, aligned_empty
from psrpc.core.policy import Policy
from psrpc.v1 import coordinator_pb2 as pb
from tests.pserver.shards import AUTHORITY, Sink, leased, session_of
from worker.data.source import Array
from worker.loop.router import Router
from worker.loop.session import WorkerSession

SGD = {"class_name": "SGD", "config": {"name": "SGD", "learning_rate": 0.5}}


@dataclass
class Shards:
    """``engines`` by index; ``cluster`` is what a coordinator would tell a worker."""

    engines: list[ShardEngine]
    servers: list[ShardServer]
    cluster: pb.GetClusterResponse


@contextmanager
def serve_shards(
    plan: Plan,
    mode: Literal["async", "sync"] = "async",
    replicas: int = 0,
    policy: Policy | None = None,
    data_port: int | None = None,
    optimizer: Mapping[str, Any] = SGD,
    engine_kind: EngineKind = "numpy",
) -> Iterator[Shards]:
    """Shards 0 to ``plan.shards`` - 1, uninitialized; of ``policy`` if it is given. ``data_port``
    is 0 for data connections."""
    policy = policy or Policy(mode=mode, replicas=replicas or None)
    engines, servers, addresses = [], [], []
    with ExitStack() as stack:
        for shard in range(plan.shards):
            updates = make_engine(engine_kind, optimizer, plan, shard)
            identity = ShardIdentity(shard, 100 + shard, 1, 1, policy, AUTHORITY.keys)
            engine = ShardEngine(identity, plan, updates, Sink())
            server = stack.enter_context(ShardServer(shard, "127.0.0.1:0", data_port=data_port))
            server.open(engine)
            engines.append(engine)
            servers.append(server)
            addresses.append(
                pb.ShardAddress(address=f"127.0.0.1:{server.port}", incarnation=100 + shard)
            )
        cluster = pb.GetClusterResponse(
            generation=1, policy=1, plan=plan.to_json(), shards=addresses
        )
        yield Shards(engines, servers, cluster)


@contextmanager
def standing_alone(connect_timeout_s: float = 5.0) -> Iterator[WorkerSession]:
    """A worker that has registered with a coordinator it never calls."""
    with CoordinatorClient("127.0.0.1:1") as client:
        standing = WorkerSession(client, incarnation=1, connect_timeout_s=connect_timeout_s)
        membership = standing.membership
        membership.registered(
            pb.RegisterWorkerResponse(worker="worker-1", session=session_of("worker-1"))
        )
        membership.joined(pb.GetClusterResponse(generation=1, policy=1))
        yield standing


def pushes(
    router: Router, batch: BatchId, attempt: int, gradients: Sequence[Gradient] | None
) -> list[GradientPush]:
    """A gradient of an attempt that was leased to ``worker-1``, at the versions received last."""
    parts = [None] * len(router.versions) if gradients is None else gradients
    return [
        leased("worker-1", batch, attempt, base, part)
        for base, part in zip(router.versions, parts, strict=True)
    ]


def pull_values(served: Shards) -> dict[str, Array]:
    """Values that the shards hold now: whole arenas by name."""
    plan = served.engines[0].plan
    into = {arena.name: aligned_empty(arena.length, arena.dtype) for arena in plan.arenas}
    with standing_alone() as standing, Router(served.cluster, plan, standing) as router:
        router.pull(None, into)
    return into
