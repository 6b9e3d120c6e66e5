"""Requests that no client of ours would send, on a bare channel to a shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from pserver.client.client import ShardClient
from pserver.engine.engine import ShardEngine
from pserver.wire import messages as wire
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from psrpc.net.channel import open_channel
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.status import error_from_rpc
from tests.pserver.shards import INITIAL, counting, engine_of, fence_of, granted, served, whole


def extent(
    arena: int, nbytes: int, encoding: types.Encoding = types.ENCODING_PLAIN
) -> types.Extent:
    return types.Extent(arena=arena, nbytes=nbytes, encoding=encoding)


def refusal(channel: grpc.Channel, method: str, *messages: bytes) -> str:
    """The message of the refusal that the stream gets, which must be InvalidArgument."""
    call = channel.stream_stream(f"/{wire.SERVICE}/{method}")  # type: ignore[call-arg]
    with pytest.raises(grpc.RpcError) as caught:
        list(call(iter(messages), timeout=30))
    error = error_from_rpc(caught.value, "the shard")
    assert isinstance(error, InvalidArgument), error
    return str(error)


class BareShard:
    """Shard 0 of ``plan``, its client, and a bare channel to it."""

    def __init__(
        self,
        plan: Plan,
        engine: ShardEngine,
        client: ShardClient,
        channel: grpc.Channel,
        announced: Mapping[str, object],
    ) -> None:
        self.plan = plan
        self.engine = engine
        self.client = client
        self.channel = channel
        self._announced = announced

    def header(self, **change: object) -> pb.PushHeader:
        fields: dict[str, object] = {
            "fence": fence_of(self.client),
            "batch": types.BatchId(epoch=0, first=0, count=4),
            "examples": 4,
            **self._announced,
        }
        return granted(pb.PushHeader(**(fields | change)))  # type: ignore[arg-type]

    def refused(self, method: str, *messages: bytes) -> str:
        return refusal(self.channel, method, *messages)

    def push(self, header: pb.PushHeader, *chunks: types.Chunk) -> str:
        first = pb.PushGradientsRequest(header=header).SerializeToString()
        rest = (pb.PushGradientsRequest(chunk=c).SerializeToString() for c in chunks)
        return self.refused("PushGradients", first, *rest)

    def unchanged(self) -> bool:
        into, before = whole(self.plan), counting(self.plan)
        self.client.pull(fence_of(self.client), None, into)
        mine = {arena.name: slice(0, arena.shard_length(0)) for arena in self.plan.arenas}
        return (
            all(np.array_equal(into[name][part], before[name][part]) for name, part in mine.items())
            and self.engine.report().version == 0
            and not self.engine.applied().to_epochs()
        )


@contextmanager
def bare_shard(plan: Plan, announced: Mapping[str, object], **options: Any) -> Iterator[BareShard]:
    """Initialized; ``announced`` is what a header says of its tensors."""
    engine = engine_of(plan)
    with served(engine, **options) as client:
        client.initialize(fence_of(client), counting(plan), INITIAL)
        with open_channel(client.peer.rpartition(" ")[2]) as channel:
            yield BareShard(plan, engine, client, channel, announced)
