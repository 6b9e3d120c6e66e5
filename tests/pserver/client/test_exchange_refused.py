"""Exchanges that make no sense: each is refused by name and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing

import grpc
import numpy as np
import pytest

from pserver.client.client import ShardClient
from pserver.engine.engine import ShardEngine
from pserver.transport.workspace import Workspace
from pserver.wire import streams
from psrpc.net.channel import open_channel
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.codec import encode_stream
from psrpc.wire.commands import to_batch
from tests.pserver.exchanges import BATCH, PLAN
from tests.pserver.malformed import refusal
from tests.pserver.shards import (
    INITIAL,
    attaching,
    counting,
    engine_of,
    fence_of,
    granted,
    part,
    served,
    whole,
)


class Raw:
    """A bare standing call."""

    def __init__(self, engine: ShardEngine, client: ShardClient, channel: grpc.Channel) -> None:
        self.engine = engine
        self.fence = fence_of(client)
        self.client = client
        self._channel = channel

    def push(self, **change: object) -> pb.PushHeader:
        fields: dict[str, object] = {
            "fence": self.fence,
            "batch": to_batch(BATCH),
            "examples": BATCH.count,
            "extents": streams.to_extents(streams.gradient_extents(PLAN, part(PLAN, whole(PLAN)))),
        }
        return granted(pb.PushHeader(**(fields | change)))  # type: ignore[arg-type]

    def refusal(self, *headers: pb.ExchangeHeader) -> str:
        return self.refusal_of([m for header in headers for m in encode_stream(header, ())])

    def refusal_of(self, messages: list[bytes]) -> str:
        return refusal(self._channel, "Exchange", *messages)


@pytest.fixture
def raw() -> Iterator[Raw]:
    engine = engine_of(PLAN)
    with served(engine) as client, open_channel(client.peer.rpartition(" ")[2]) as channel:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        yield Raw(engine, client, channel)
        into = whole(PLAN)
        client.pull(fence_of(client), None, into)
        for name, array in counting(PLAN).items():
            np.testing.assert_array_equal(into[name], array)
        assert not engine.applied().to_epochs()


PLAIN = types.ENCODING_PLAIN


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (lambda _: pb.ExchangeHeader(), "asks for nothing"),
        (
            lambda raw: pb.ExchangeHeader(
                push=raw.push(), attach=pb.Attach(pid=1, fd=1, nbytes=1 << 20)
            ),
            "before anything else",
        ),
        (
            lambda raw: pb.ExchangeHeader(push=raw.push(), push_at=[4096, 1 << 16]),
            "the push lies in a segment, and none is attached",
        ),
        (
            lambda raw: pb.ExchangeHeader(
                pull=pb.PullRequest(fence=raw.fence, newest=True, encoding=PLAIN), pull_at=[0, 0]
            ),
            "the pull lies in a segment, and none is attached",
        ),
        (
            lambda raw: pb.ExchangeHeader(
                push=raw.push(skipped=True, extents=[]), pull=pb.PullRequest(snapshot="a")
            ),
            "a pull with a push is of the newest values or of a round",
        ),
        (
            lambda raw: pb.ExchangeHeader(
                push=raw.push(skipped=True, extents=[]), pull=pb.PullRequest(newest=True)
            ),
            "encoding 0 is unknown",
        ),
        (
            lambda raw: pb.ExchangeHeader(
                pull=pb.PullRequest(fence=raw.fence, newest=True, encoding=types.ENCODING_TOPK)
            ),
            "asked for as topk; expected plain or bfloat16 or float16",
        ),
        (
            lambda raw: pb.ExchangeHeader(
                push=raw.push(
                    extents=[types.Extent(arena=1, nbytes=10, encoding=types.ENCODING_BFLOAT16)]
                )
            ),
            "float32.state as bfloat16; expected plain",
        ),
        (
            lambda raw: pb.ExchangeHeader(
                push=raw.push(
                    extents=[types.Extent(arena=0, nbytes=12008, encoding=types.ENCODING_TOPK)]
                )
            ),
            "as topk; expected a multiple of 8, at most 12000",
        ),
    ],
)
def test_headers_that_make_no_sense(
    raw: Raw, header: Callable[[Raw], pb.ExchangeHeader], words: str
) -> None:
    assert re.search(words, raw.refusal(header(raw)))


@pytest.mark.parametrize(
    ("push_at", "words"),
    [
        ([4096], "names 1 places in the segment; expected 2"),
        ([0, 1 << 16], "at offset 0 of the shared segment"),
        ([4096, 1 << 40], f"at offset {1 << 40} of the shared segment"),
        ([4097, 1 << 14], "offset 4097 of the shared segment; expected a multiple of 64"),
    ],
)
def test_places_outside_of_the_segment(raw: Raw, push_at: list[int], words: str) -> None:
    with closing(Workspace(PLAN)) as workspace:
        header = pb.ExchangeHeader(push=raw.push(), push_at=push_at)
        assert words in raw.refusal(attaching(workspace), header)


@pytest.mark.parametrize("pull_at", [[0, 0], [1 << 40, 1 << 40], [4097, 1 << 14], [4096]])
def test_a_push_is_not_applied_when_there_is_no_place_for_the_values(
    raw: Raw, pull_at: list[int]
) -> None:
    with closing(Workspace(PLAN)) as workspace:
        header = pb.ExchangeHeader(
            push=raw.push(skipped=True, extents=[]),
            pull=pb.PullRequest(newest=True, encoding=PLAIN),
            pull_at=pull_at,
        )
        assert "segment" in raw.refusal(attaching(workspace), header)

        # The fixture has the shard show that nothing was recorded.


@pytest.mark.parametrize("asks", ["push", "pull"])
def test_a_chunk_that_no_header_announces(raw: Raw, asks: str) -> None:
    request = pb.PullRequest(fence=raw.fence, newest=True, encoding=PLAIN)
    header = (
        pb.ExchangeHeader(pull=request)
        if asks == "pull"
        else pb.ExchangeHeader(push=raw.push(skipped=True, extents=[]))
    )
    message = pb.ExchangeRequest(header=header, chunk=types.Chunk(data=bytes(8)))
    assert "a chunk of 8 bytes comes with a header that announces none" in raw.refusal_of(
        [message.SerializeToString()]
    )
