"""Shards to test against: the real engine, server and client, with the numpy updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from coordinator.job.authority import Authority
from pserver.client.client import PushResult, RetryPolicy, ShardClient
from pserver.client.requests import Arrays, GradientPush, PullInfo, Source
from pserver.core.fence import ShardIdentity
from pserver.core.requests import Snapshot, StagedEverywhere
from pserver.core.table_ids import RowsWanted
from pserver.engine.engine import ShardEngine
from pserver.server.own_process import OwnProcess
from pserver.server.server import ShardServer
from pserver.transport.workspace import Workspace
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, SnapshotOrder
from psrpc.core.encoding import Encoding, Gradient, plain
from psrpc.core.placement import make_plan
from psrpc.core.plan import Plan, VariableSpec, aligned_empty
from psrpc.core.policy import Policy
from psrpc.core.tables import Rows
from psrpc.ops.clock import Clock
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types

INCARNATION = 77

AUTHORITY = Authority(Random(0).randbytes)
"""The coordinator whose sessions, grants and decisions these shards accept."""

INITIAL = AUTHORITY.grant_initialize("worker-1", 1)
"""With this grant ``worker-1`` initializes shards in generation 1."""

Transport = Literal["calls", "data connection", "shared memory", "own process"]
"""How tensors of exchanges travel."""

TRANSPORTS: tuple[Transport, ...] = get_args(Transport)[:3]

WITH_OWN: tuple[Transport, ...] = (*TRANSPORTS, "own process")
"""With the calls of a worker that hosts the shard, which has no rows and no compression."""

COMMON: dict[str, Any] = {
    "learning_rate": 1.0,
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}
"""What the configs of all optimizers of Keras have."""

SGD: dict[str, Any] = {
    "class_name": "SGD",
    "config": {**COMMON, "name": "SGD", "momentum": 0.0, "nesterov": False},
}
MOMENTUM = SGD | {"config": SGD["config"] | {"momentum": 0.5}}

NDArray = npt.NDArray[Any]


def plan_of(shards: int = 1, size: int = 96, *, state: bool = True) -> Plan:
    """Two trainable variables of ``size`` elements together, and a state variable of 5."""
    variables = [
        VariableSpec("dense/kernel", (size // 2, 1), "float32", "trainable"),
        VariableSpec("dense/bias", (size - size // 2,), "float32", "trainable"),
    ]
    if state:
        variables.append(VariableSpec("norm/mean", (5,), "float32", "state"))
    return make_plan(variables, shards, "cut")


def whole(plan: Plan, value: float = 0.0) -> dict[str, NDArray]:
    """A worker's arrays, all elements ``value``."""
    arrays = {arena.name: aligned_empty(arena.length, arena.dtype) for arena in plan.arenas}
    for array in arrays.values():
        array.fill(value)
    return arrays


def counting(plan: Plan) -> dict[str, NDArray]:
    """A worker's arrays with elements 0, 1, 2, ..."""
    arrays = whole(plan)
    for array in arrays.values():
        array[:] = np.arange(len(array))
    return arrays


def part(plan: Plan, arrays: Mapping[str, NDArray], shard: int = 0) -> Gradient:
    """The part of a worker's arrays that ``shard`` gets."""
    return {a.name: plain(arrays[a.name][a.cuts[shard] : a.cuts[shard + 1]]) for a in plan.arenas}


@dataclass
class Sink:
    """A snapshot sink that remembers."""

    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    repeats: list[str] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)

    def begun(self, generation: int) -> None:
        self.generations.append(generation)

    def taken(self, order: SnapshotOrder, snapshot: Snapshot) -> None:
        self.snapshots[order.name] = snapshot

    def failed(self, order: SnapshotOrder, version: int, reason: str) -> None:
        self.failures[order.name] = reason

    def repeated(self, order: SnapshotOrder) -> None:
        self.repeats.append(order.name)


def identity_of(
    shard: int = 0, mode: Literal["async", "sync"] = "async", replicas: int = 0
) -> ShardIdentity:
    """Generation 1, policy 1, with the keys of :data:`AUTHORITY`."""
    policy = Policy(mode=mode, replicas=replicas or None)
    return ShardIdentity(shard, INCARNATION, 1, 1, policy, AUTHORITY.keys)


@lru_cache
def session_of(worker: str, certificate: str = "") -> bytes:
    """The token of ``worker``'s one session."""
    return AUTHORITY.open_session(worker, certificate)


def fence_of(
    client: ShardClient,
    generation: int = 1,
    *,
    worker: str = "worker-1",
) -> types.Fence:
    """The fence of calls of ``worker``, registered with the certificate of ``client``."""
    security = client.security
    certificate = "worker" if security.encrypted and not security.by_token else ""
    return client.fence(generation, 1, session_of(worker, certificate))


def grant_of(worker: str, batch: BatchId, attempt: int, generation: int = 1) -> bytes:
    """The proof that the attempt was leased to ``worker``."""
    return AUTHORITY.grant(worker, generation, Attempt(batch, attempt))


def leased(
    worker: str,
    batch: BatchId,
    attempt: int,
    base_version: int,
    gradients: Gradient | None,
    rows: Mapping[int, Rows] | None = None,
    *,
    generation: int = 1,
) -> GradientPush:
    """The push of an attempt that was leased to ``worker``."""
    grant = grant_of(worker, batch, attempt, generation)
    return GradientPush(batch, attempt, base_version, gradients, rows, (), grant)


def granted(header: pb.PushHeader, worker: str = "worker-1") -> pb.PushHeader:
    """``header``, with the proof that its attempt was leased to ``worker``."""
    batch = BatchId(header.batch.epoch, header.batch.first, header.batch.count)
    header.grant = grant_of(worker, batch, header.attempt, header.fence.generation)
    return header


def signed(decision: types.Decision) -> types.SignedDecision:
    """A decision as it travels through workers."""
    proof = AUTHORITY.sign(decision.SerializeToString(deterministic=True))
    return types.SignedDecision(decision=proof.decision, signature=proof.signature)


def engine_of(
    plan: Plan,
    shard: int = 0,
    *,
    replicas: int = 0,
    optimizer: dict[str, Any] = SGD,
    sink: Sink | None = None,
    policy: Policy | None = None,
    clock: Clock | None = None,
    first_rows: str = "",
) -> ShardEngine:
    """A shard without values; sync when ``replicas`` is given, or by ``policy``."""
    identity = identity_of(shard, "sync" if replicas else "async", replicas)
    if policy is not None:
        identity = replace(identity, settings=policy)
    updates = NumpyEngine(optimizer, plan, shard)
    return ShardEngine(identity, plan, updates, sink or Sink(), clock, first_rows)


ONE_TRY = RetryPolicy(budget_s=0.0)


def attaching(workspace: Workspace) -> pb.ExchangeHeader:
    """The request that has shard 0 attach a worker's segment."""
    assert workspace.segment is not None
    offer = workspace.segment.offer(0)
    attach = pb.Attach(
        pid=offer.pid, fd=offer.fd, nbytes=offer.nbytes, nonce=offer.nonce, slot=offer.slot
    )
    return pb.ExchangeHeader(attach=attach)


class SharingClient(ShardClient):
    """A client that receives into shared memory, and copies to where a test wants it."""

    def __init__(
        self,
        *where: Any,
        plan: Plan,
        wire: Encoding = "plain",
        rows_nbytes: int = 0,
        **options: Any,
    ) -> None:
        self.workspace = Workspace(plan, wire, rows_nbytes=rows_nbytes)
        assert self.workspace.segment is not None, self.workspace.why
        super().__init__(*where, workspace=self.workspace, **options)

    def pull(
        self,
        fence: types.Fence,
        source: Source,
        into: Arrays,
        decision: types.SignedDecision | None = None,
        rows: RowsWanted | None = None,
        patience_s: float | None = None,
        staged: Sequence[StagedEverywhere] = (),
        clock: types.WorkerClock | None = None,
    ) -> PullInfo:
        mine = self.workspace.sets[0]
        info = super().pull(fence, source, mine, decision, rows, patience_s, staged, clock)
        self._hand_over(self.workspace.sets[0], into)
        return info

    def push_pull(
        self,
        fence: types.Fence,
        push: GradientPush,
        into: Arrays,
        rows: RowsWanted | None = None,
        round_number: int | None = None,
        clock: types.WorkerClock | None = None,
    ) -> tuple[PushResult, PullInfo]:
        answer = super().push_pull(fence, push, self.workspace.sets[1], rows, round_number, clock)
        self._hand_over(self.workspace.sets[1], into)
        return answer

    def _hand_over(self, mine: Arrays, into: Arrays) -> None:
        assert self.shares_memory
        for name, array in into.items():
            array[:] = mine[name]


@contextmanager
def served(
    engine: ShardEngine,
    retry: RetryPolicy = ONE_TRY,
    *,
    transport: Transport = "calls",
    deadline_s: float = 60.0,
    rows_nbytes: int = 0,
    falls_back: bool = False,
) -> Iterator[ShardClient]:
    """The shard behind a real server on a free port, and a client that tries once. Tensors must
    have travelled by ``transport``, or by calls if it ``falls_back`` in the end."""
    shard = engine.identity.shard
    data_port = 0 if transport == "data connection" else None
    with ShardServer(shard, "127.0.0.1:0", data_port=data_port) as server:
        server.open(engine)
        where = (f"127.0.0.1:{server.port}", INCARNATION, engine.plan, shard)
        own = OwnProcess(engine, f"shard {shard}", "", lambda: False)
        client = (
            SharingClient(
                *where,
                plan=engine.plan,
                retry=retry,
                deadline_s=deadline_s,
                rows_nbytes=rows_nbytes,
            )
            if transport == "shared memory"
            else ShardClient(
                *where,
                retry=retry,
                deadline_s=deadline_s,
                local=own if transport == "own process" else None,
            )
        )
        with client:
            yield client
            found = client.transport
            assert found is None or found.kind == ("calls" if falls_back else transport), found
