"""Streams that no client of ours would send: refused, and the shard stays as it was."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

import grpc
import pytest

from pserver.client.client import ShardClient
from pserver.wire import messages as wire
from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidArgument
from psrpc.net.channel import bind, make_server
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.codec import MAX_CHUNK_BYTES, encode_stream
from psrpc.wire.status import error_from_rpc
from tests.pserver.malformed import BareShard, bare_shard, extent
from tests.pserver.shards import INITIAL, counting, engine_of, fence_of, plan_of, served, whole

PLAN = plan_of(size=24)
TRAINABLE, STATE = 24 * 4, 5 * 4


def chunk(message: types.Chunk) -> bytes:
    return pb.PushGradientsRequest(chunk=message).SerializeToString()


@pytest.fixture
def shard() -> Iterator[BareShard]:
    with bare_shard(PLAN, {"extents": [extent(0, TRAINABLE), extent(1, STATE)]}) as shard:
        yield shard


def data(arena: int, offset: int, nbytes: int) -> types.Chunk:
    return types.Chunk(arena=arena, offset=offset, data=b"\x01" * nbytes)


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([], "ended at byte 0 of arena float32.trainable; expected 96"),
        ([data(0, 0, 96)], "ended at byte 0 of arena float32.state; expected 20"),
        ([data(0, 0, 48)], "ended at byte 48 of arena float32.trainable; expected 96"),
        ([data(0, 0, 96), data(1, 0, 24)], "has 24 bytes; expected at most the 20"),
        ([data(0, 0, 96), data(1, 0, 20), data(1, 20, 4)], "goes on after its last announced"),
        ([data(1, 0, 20)], r"is of arena 1; expected arena 0 \(float32.trainable\)"),
        ([data(7, 0, 96)], r"is of arena 7; expected arena 0"),
        ([data(0, 4, 92)], "has offset 4; expected 0"),
        ([data(0, 0, 48), data(0, 0, 48)], "has offset 0; expected 48"),
        ([data(0, 0, 48), data(0, 52, 44)], "has offset 52; expected 48"),
        ([data(0, 0, 47)], "has 47 bytes; expected 1 to 2097152, in whole elements of 4"),
        ([data(0, 0, 0)], "has 0 bytes; expected 1"),
        ([data(0, 2**63, 96)], "has offset 9223372036854775808; expected 0"),
    ],
)
def test_chunks_that_do_not_fit(
    shard: BareShard, chunks: Sequence[types.Chunk], words: str
) -> None:
    assert re.search(words, shard.push(shard.header(), *chunks))
    assert shard.unchanged()
    assert shard.engine.report().counters.refused == 1


def extents(*pairs: tuple[int, int]) -> list[types.Extent]:
    return [extent(arena, nbytes) for arena, nbytes in pairs]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extents": []}, "does not announce arena float32.trainable"),
        ({"extents": extents((0, 96))}, "does not announce arena float32.state"),
        (
            {"extents": extents((0, 92), (1, 20))},
            "92 bytes of arena float32.trainable as plain; expected 96",
        ),
        ({"extents": extents((0, 1 << 60), (1, 20))}, f"announces {1 << 60} bytes"),
        ({"extents": extents((0, 96), (1, 20), (2, 4))}, "announces arena 2; the plan has 2"),
        ({"extents": extents((0, 96), (0, 96), (1, 20))}, "float32.trainable twice"),
        ({"examples": 3}, "says it has 3 examples; expected 4"),
        ({"batch": types.BatchId(epoch=0, first=0, count=0)}, "count 0; expected at least 1"),
        (
            {"batch": types.BatchId(epoch=0, first=(1 << 63) - 3, count=4)},
            "first 9223372036854775805; expected less",
        ),
        ({"skipped": True}, "skipped push .* announces 2 arenas and rows of 0 tables; expected n"),
    ],
)
def test_headers_that_do_not_fit(shard: BareShard, change: dict[str, object], words: str) -> None:
    assert re.search(words, shard.push(shard.header(**change), data(0, 0, 96), data(1, 0, 20)))
    assert shard.unchanged()


def test_a_skipped_push_with_data(shard: BareShard) -> None:
    header = shard.header(skipped=True, extents=[])
    assert "goes on after its last announced byte: 96 bytes" in shard.push(header, data(0, 0, 96))
    assert shard.unchanged()


def test_an_oversized_chunk(shard: BareShard) -> None:
    words = shard.push(shard.header(), data(0, 0, MAX_CHUNK_BYTES + 4))
    assert f"has {MAX_CHUNK_BYTES + 4} bytes; expected at most" in words
    assert shard.unchanged()


def test_streams_without_a_header_or_with_two(shard: BareShard) -> None:
    assert "the stream is empty" in shard.refused("PushGradients")
    assert "begins without a header" in shard.refused("PushGradients", chunk(data(0, 0, 96)))
    first = pb.PushGradientsRequest(header=shard.header()).SerializeToString()
    assert "second header" in shard.refused("PushGradients", first, first)
    assert "header" in shard.refused("Initialize", b"")
    assert shard.unchanged()


def test_garbage(shard: BareShard) -> None:
    rng = random.Random(1)
    good = pb.PushGradientsRequest(header=shard.header(), chunk=data(0, 0, 96)).SerializeToString()
    for _ in range(12):
        shard.refused("PushGradients", rng.randbytes(rng.randrange(1, 200)))
        shard.refused("Exchange", rng.randbytes(64))
        shard.refused("PushGradients", good[: rng.randrange(1, len(good))])
    shard.refused("PushGradients", good, b"\xff" * 40)
    assert shard.unchanged()


def test_pulls_that_name_nothing(shard: BareShard) -> None:
    call = shard.channel.unary_stream(f"/{wire.SERVICE}/Pull")  # type: ignore[call-arg]
    request = pb.PullRequest(fence=fence_of(shard.client), encoding=types.ENCODING_PLAIN)
    with pytest.raises(grpc.RpcError) as caught:
        list(call(request.SerializeToString(), timeout=30))
    assert "names no source" in str(error_from_rpc(caught.value, "the shard"))


def test_an_answer_that_does_not_fit_is_refused_by_the_client() -> None:
    wider = plan_of(size=48)
    engine = engine_of(wider)
    with served(engine) as client:
        client.initialize(fence_of(client), counting(wider), INITIAL)
        address = client.peer.rpartition(" ")[2]
        with ShardClient(address, 77, PLAN, 0) as other:
            fence = fence_of(client)
            with pytest.raises(InvalidArgument, match=r"answered what cannot be used.*192 bytes"):
                other.pull(fence, None, whole(PLAN))


def test_an_answer_without_values_is_refused_by_the_client() -> None:
    def answers(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        for _request in requests:
            yield from encode_stream(pb.ExchangeAnswer(), ())

    method = grpc.stream_stream_rpc_method_handler(answers)
    server = make_server(1)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(wire.SERVICE, {"Exchange": method}),)
    )
    port = bind(server, "127.0.0.1:0")
    server.start()
    try:
        with (
            ShardClient(f"127.0.0.1:{port}", 77, PLAN, 0) as client,
            pytest.raises(InvalidArgument, match=r"answered what cannot be used.*announce"),
        ):
            client.pull(fence_of(client), None, whole(PLAN))
    finally:
        server.stop(0).wait()


def test_messages_of_the_generated_classes_are_understood(shard: BareShard) -> None:
    call = shard.channel.stream_stream(
        f"/{wire.SERVICE}/Exchange",
        request_serializer=pb.ExchangeRequest.SerializeToString,
        response_deserializer=pb.ExchangeResponse.FromString,
    )
    both = pb.ExchangeHeader(
        push=shard.header(), pull=pb.PullRequest(newest=True, encoding=types.ENCODING_PLAIN)
    )
    messages = [
        pb.ExchangeRequest(header=both),
        *(pb.ExchangeRequest(chunk=data(0, at, 48)) for at in (0, 48)),
        pb.ExchangeRequest(chunk=data(1, 0, 20)),
    ]
    again = [pb.ExchangeRequest(header=both), pb.ExchangeRequest(chunk=data(0, 0, 96)), messages[3]]
    answers = list(call(iter([*messages, *again]), timeout=30))
    assert [(a.chunk.arena, a.chunk.offset, len(a.chunk.data)) for a in answers] == [
        (0, 0, 96),
        (1, 0, 20),
    ] * 2
    assert answers[0].header.push.outcome == pb.PUSH_OUTCOME_APPLIED
    assert answers[2].header.push.outcome == pb.PUSH_OUTCOME_ALREADY_APPLIED
    assert answers[2].chunk.data == answers[0].chunk.data
    assert shard.engine.applied().contains(BatchId(0, 0, 4))
