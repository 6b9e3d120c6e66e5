"""Calls that would take all of a shard's threads or buffers, and for good."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import closing

import grpc
import pytest

from pserver.client.client import RetryPolicy, ShardClient
from pserver.server import servicer
from pserver.server.server import ShardServer
from pserver.server.servicer import Conversation
from pserver.transport.grpc_stream import ShardStream
from pserver.transport.shard_memory import ShardMemory
from pserver.transport.workspace import Workspace
from pserver.wire import messages as wire
from psrpc.core.errors import NotReady
from psrpc.net.channel import bind, make_server, open_channel
from psrpc.net.limits import NO_DEADLINE_S
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.codec import encode_stream
from tests.pserver.shards import (
    INCARNATION,
    INITIAL,
    ONE_TRY,
    attaching,
    counting,
    engine_of,
    fence_of,
    granted,
    plan_of,
    whole,
)

PLAN = plan_of()


def test_more_conversations_than_a_shard_can_hold() -> None:
    with ShardServer(0, "127.0.0.1:0", conversations=1) as server:
        server.open(engine_of(PLAN))
        where = (f"127.0.0.1:{server.port}", INCARNATION, PLAN, 0)
        heard: list[str] = []
        retry = RetryPolicy(first_s=0.001, budget_s=30)
        with ShardClient(*where) as first, ShardClient(*where, retry=ONE_TRY) as second:
            fence = fence_of(first)
            first.initialize(fence, counting(PLAN), INITIAL)
            first.pull(fence, None, whole(PLAN))
            with pytest.raises(NotReady, match=r"holds 1 conversations.* waits for one to end"):
                second.pull(fence_of(second, worker="worker-2"), None, whole(PLAN))
            assert second.get_status().initialized
            assert not second.initialize(fence, counting(PLAN), INITIAL)

            def announce(reason: str) -> None:
                heard.append(reason)
                first.close()

            with ShardClient(*where, retry=retry, announce=announce) as third:
                third.pull(fence_of(third, worker="worker-3"), None, whole(PLAN))
        assert "holds 1 conversations" in heard[0]


def test_a_conversation_that_was_cut_off_lets_go_of_the_segment() -> None:
    """At once: gRPC's error and its frames refer to each other, and live on as garbage."""
    errors: list[grpc.RpcError] = []
    gone = threading.Event()
    with closing(Workspace(PLAN)) as workspace:
        attach = attaching(workspace)

        def messages() -> Iterator[bytes]:
            yield from encode_stream(attach, ())
            end = conversation._transport
            assert isinstance(end, ShardMemory)
            weakref.finalize(end._segment, gone.set)
            del end
            errors.append(grpc.RpcError())
            raise errors[0]

        conversation = Conversation(engine_of(PLAN), ShardStream(messages(), PLAN))
        with pytest.raises(grpc.RpcError):
            list(conversation.answers(lambda: 30))
    assert gone.is_set()


@pytest.mark.parametrize("method", ["PushGradients", "Exchange"])
def test_a_call_without_a_deadline_is_given_one(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a client that stops in the middle of a push would keep its buffer for good."""
    monkeypatch.setattr(servicer, "NO_DEADLINE_S", 0.05)
    engine = engine_of(PLAN)
    with ShardServer(0, "127.0.0.1:0") as server:
        server.open(engine)
        address = f"127.0.0.1:{server.port}"
        with ShardClient(address, INCARNATION, PLAN, 0) as client:
            fence = fence_of(client)
            client.initialize(fence, counting(PLAN), INITIAL)
            extents = [
                types.Extent(arena=0, nbytes=96 * 4, encoding=types.ENCODING_PLAIN),
                types.Extent(arena=1, nbytes=5 * 4, encoding=types.ENCODING_PLAIN),
            ]
            push = granted(
                pb.PushHeader(
                    fence=fence,
                    batch=types.BatchId(epoch=0, first=0, count=4),
                    examples=4,
                    extents=extents,
                )
            )
            first = (
                pb.ExchangeRequest(header=pb.ExchangeHeader(push=push))
                if method == "Exchange"
                else pb.PushGradientsRequest(header=push)
            )
            for_good = threading.Event()

            def requests() -> Iterator[bytes]:
                yield first.SerializeToString()
                assert for_good.wait(30)

            with open_channel(address) as channel:
                call = channel.stream_stream(f"/{wire.SERVICE}/{method}")  # type: ignore[call-arg]
                with pytest.raises(grpc.RpcError) as caught:
                    list(call(requests()))
                assert caught.value.code() is grpc.StatusCode.CANCELLED
                for_good.set()
    pool = engine._intake.pool
    with pool._changed:
        assert pool._changed.wait_for(lambda: len(pool._free) == pool._made, 30)


def test_a_call_without_a_deadline_waits_for_less_than_it_may_last() -> None:
    found: list[float] = []

    def ask(request: bytes, context: grpc.ServicerContext) -> bytes:
        found.append(servicer.patience_s(context))
        return request

    method = grpc.unary_unary_rpc_method_handler(ask)
    server = make_server(1)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a", {"b": method}),))
    with open_channel(f"127.0.0.1:{bind(server, '127.0.0.1:0')}") as channel:
        server.start()
        call = channel.unary_unary("/a/b")  # type: ignore[call-arg]
        call(b"")
        call(b"", timeout=20)
    server.stop(0).wait()
    endless, within = found
    assert endless == NO_DEADLINE_S / 2
    assert 0 < within < 20
