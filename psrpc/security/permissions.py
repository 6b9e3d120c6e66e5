"""Which role may call which RPC: one table. What is not in it may be called by nobody. And who may
read `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from psrpc.security.identity import Identity, Role

_COORDINATOR = "/psrpc.v1.Coordinator/"
_SHARD = "/psrpc.v1.ParameterServer/"
_HEALTH = "/grpc.health.v1.Health/"

_EVERYBODY = frozenset(Role)
_SHARDS = frozenset({Role.SHARD})
_WORKERS = frozenset({Role.WORKER})
_OPERATORS = frozenset({Role.OPERATOR})

PERMISSIONS: Mapping[str, frozenset[Role]] = MappingProxyType(
    {
        _COORDINATOR + "GetJob": frozenset({Role.WORKER, Role.OPERATOR}),
        _COORDINATOR + "RegisterShard": _SHARDS,
        _COORDINATOR + "ReportShardReady": _SHARDS,
        _COORDINATOR + "HeartbeatShard": _SHARDS,
        _COORDINATOR + "Watch": _SHARDS,
        _COORDINATOR + "ReportSnapshot": _SHARDS,
        _COORDINATOR + "RegisterWorker": _WORKERS,
        _COORDINATOR + "HeartbeatWorker": _WORKERS,
        # Where the shards are: for whoever looks rows up, too.
        _COORDINATOR + "GetCluster": frozenset({Role.WORKER, Role.OPERATOR, Role.READER}),
        _COORDINATOR + "LeaseWork": _WORKERS,
        _COORDINATOR + "CommitBatch": _WORKERS,
        _COORDINATOR + "ReportWork": _WORKERS,
        _COORDINATOR + "LeaveWorker": _WORKERS,
        _COORDINATOR + "SetPolicy": _OPERATORS,
        _COORDINATOR + "RevokeWorker": _OPERATORS,
        _COORDINATOR + "GetJobStatus": frozenset({Role.OPERATOR, Role.READER}),
        _COORDINATOR + "GetDashboard": _OPERATORS,
        _SHARD + "Initialize": _WORKERS,
        _SHARD + "Pull": _WORKERS,
        _SHARD + "PushGradients": _WORKERS,
        _SHARD + "Exchange": _WORKERS,
        _SHARD + "LookUp": frozenset({Role.OPERATOR, Role.READER}),
        _SHARD + "GetStatus": frozenset({Role.WORKER, Role.OPERATOR}),
        _HEALTH + "Check": _EVERYBODY,
        _HEALTH + "List": _EVERYBODY,
        # Answered with UNIMPLEMENTED: see psrpc.net.health_service.
        _HEALTH + "Watch": _EVERYBODY,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATORS,
    }
)
"""Full name of an RPC, as it is on the wire, and who may call it."""


def roles_of(method: str) -> frozenset[Role]:
    """Who may call the RPC with the full name ``method``, e.g. ``/psrpc.v1.Coordinator/GetJob``."""
    return PERMISSIONS.get(method, frozenset())


def may_read_metrics(peer: Identity | None, server: Identity) -> bool:
    """Whether ``peer``, None for nobody that is known, may read the metrics of ``server``: people,
    what collects metrics, which needs no more than a reader's certificate, and the process itself,
    which asks for its own health."""
    allowed = (Role.OPERATOR, Role.READER, server.role)
    return peer is not None and peer.job == server.job and peer.role in allowed
