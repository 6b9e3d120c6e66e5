"""All RPCs of this project's servers, and requests that would change something."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from pserver.core.assembly import shard_extents
from pserver.wire import streams
from psrpc import SOFTWARE
from psrpc.core.encoding import plain
from psrpc.security.signatures import SECRET_BYTES
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import parameter_server_pb2 as shard_pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.codec import encode_stream
from psrpc.wire.status import METADATA_KEY
from tests.coordinator.builders import SHA
from tests.pserver.shards import INCARNATION, INITIAL, counting, granted, part, plan_of, session_of

PLAN = plan_of()
FENCE = types.Fence(
    generation=1,
    policy=1,
    plan_hash=PLAN.hash,
    shard_incarnation=INCARNATION,
    session=session_of("worker-1", "worker"),
)
"""Of a worker that has registered with the certificate of its role."""

WAIT_S = 0.2
"""Deadline of a call that would be parked; the others answer at once, however long that takes."""


@dataclass(frozen=True)
class Answer:
    """Result of a call.

    Attributes:
        code: gRPC's status.
        details: in words.
        told: whether a server of ours raised it, after it had let the caller through or refused it.
    """

    code: grpc.StatusCode
    details: str = ""
    told: bool = False

    @property
    def connected(self) -> bool:
        """Whether the call came to a server at all."""
        return self.told or self.code != grpc.StatusCode.UNAVAILABLE


@dataclass(frozen=True)
class Rpc:
    """One method.

    Attributes:
        name: in full, as on the wire.
        messages: what a client sends, serialized.
        streams: whether it sends a stream, and whether it gets one.
    """

    name: str
    messages: tuple[bytes, ...]
    streams: tuple[bool, bool]

    def __str__(self) -> str:
        return self.name.rpartition("/")[2]

    def call(self, channel: grpc.Channel, **options: Any) -> Answer:
        """Calls it, and hangs up at the first response."""
        kind = "_".join("stream" if streams else "unary" for streams in self.streams)
        method = getattr(channel, kind)(self.name)
        request = iter(self.messages) if self.streams[0] else self.messages[0]
        timeout = WAIT_S if str(self) == "GetCluster" else 20.0
        try:
            answer = method(request, timeout=timeout, **options)
            if self.streams[1]:
                next(answer, None)
                answer.cancel()
        except grpc.RpcError as error:
            sent: Any = error.trailing_metadata() or ()
            told = METADATA_KEY in dict(sent)
            return Answer(error.code(), error.details() or "", told)
        return Answer(grpc.StatusCode.OK)


def rpcs_of(*services: Any) -> list[Rpc]:
    """Everything that is declared in the protos."""
    return [
        Rpc(
            f"/{service.full_name}/{method.name}",
            tuple(MESSAGES.get(method.name, (b"",))),
            (method.client_streaming, method.server_streaming),
        )
        for service in services
        for method in service.methods
    ]


def _push(first: int, in_exchange: bool) -> Iterable[bytes]:
    gradient = part(PLAN, counting(PLAN))
    push = shard_pb.PushHeader(
        fence=FENCE,
        batch=types.BatchId(epoch=0, first=first, count=4),
        examples=4,
        extents=streams.to_extents(streams.gradient_extents(PLAN, gradient)),
    )
    granted(push)
    header = shard_pb.ExchangeHeader(push=push) if in_exchange else push
    return encode_stream(header, streams.gradient_parts(PLAN, gradient))


def _initialize() -> Iterable[bytes]:
    values = {name: plain(array) for name, array in counting(PLAN).items()}
    extents = streams.to_extents(shard_extents(PLAN, 0))
    header = shard_pb.InitializeHeader(fence=FENCE, extents=extents, grant=INITIAL)
    return encode_stream(header, streams.gradient_parts(PLAN, values))


MESSAGES: dict[str, list[bytes]] = {
    "RegisterShard": [
        pb.RegisterShardRequest(
            shard=0, incarnation=7, address="127.0.0.1:1", host="h", pid=1, software=SOFTWARE
        ).SerializeToString()
    ],
    "RegisterWorker": [
        pb.RegisterWorkerRequest(
            incarnation=8,
            host="h",
            pid=1,
            job_sha256=SHA,
            software=SOFTWARE,
            device="cpu",
            secret=bytes(SECRET_BYTES),
        ).SerializeToString()
    ],
    "SetPolicy": [pb.SetPolicyRequest(settings=["mode=ssp", "staleness=4"]).SerializeToString()],
    "EndHold": [pb.EndHoldRequest(at=0, until=1, rate=0.5).SerializeToString()],
    "RevokeWorker": [pb.RevokeWorkerRequest(worker="worker-0", bar=True).SerializeToString()],
    "Initialize": list(_initialize()),
    "PushGradients": list(_push(0, in_exchange=False)),
    "Exchange": list(_push(4, in_exchange=True)),
    "ServerReflectionInfo": [
        reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    ],
}
"""What would change something, or is answered; of all others an empty message."""

_OF_BOTH = (
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
COORDINATOR = rpcs_of(pb.DESCRIPTOR.services_by_name["Coordinator"], *_OF_BOTH)
SHARD = rpcs_of(shard_pb.DESCRIPTOR.services_by_name["ParameterServer"], *_OF_BOTH)
