"""The standing call: encodings, segments, and sessions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

import numpy as np
import pytest

from pserver.client.client import ShardClient
from pserver.transport.workspace import Workspace
from psrpc.core.encoding import (
    Encoded,
    Gradient,
    decode,
    encode_int8,
    encode_topk,
    round_to,
    wire_dtype,
)
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import to_batch
from tests.pserver.exchanges import BATCH, NAME, PLAN, STATE, normal
from tests.pserver.shards import (
    INCARNATION,
    INITIAL,
    TRANSPORTS,
    NDArray,
    SharingClient,
    Transport,
    counting,
    engine_of,
    fence_of,
    leased,
    part,
    served,
    signed,
    whole,
)

Rounding = Literal["bfloat16", "float16"]
Compression = Literal["int8", "topk"]


def encoded(
    arrays: Mapping[str, NDArray], encoding: Rounding | Compression
) -> tuple[Gradient, NDArray]:
    """A gradient with its trainable arena in ``encoding``, and the values that this means."""
    array = arrays[NAME]
    gradient = dict(part(PLAN, arrays))
    if encoding == "int8" or encoding == "topk":
        raw = encode_int8(array) if encoding == "int8" else encode_topk(array, 100)
        meant = np.empty_like(array)
        decode(encoding, raw, meant)
    else:
        raw = round_to(array, encoding)
        meant = raw.astype(np.float32)
    gradient[NAME] = Encoded(encoding, (raw[:1000], raw[1000:]) if len(raw) > 1000 else (raw,))
    return gradient, meant


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("encoding", ["bfloat16", "float16", "int8", "topk"])
def test_gradients_in_every_encoding(
    encoding: Rounding | Compression, replicas: int, transport: Transport
) -> None:
    gradient, meant = encoded(normal(), encoding)
    with served(engine_of(PLAN, replicas=replicas), transport=transport) as client:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)
        assert client.push(fence, leased("worker-1", BATCH, 1, 0, gradient)).version == 1 - replicas
        decision = types.Decision(
            generation=1, attempts=[types.Attempt(batch=to_batch(BATCH), attempt=1)]
        )
        into = whole(PLAN)
        client.pull(fence, 1 if replicas else None, into, signed(decision) if replicas else None)
        assert client.shares_memory == (transport == "shared memory")
    np.testing.assert_array_equal(into[NAME], counting(PLAN)[NAME] - meant)
    np.testing.assert_array_equal(into[STATE], counting(PLAN)[STATE] + normal()[STATE])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("encoding", ["bfloat16", "float16"])
def test_values_in_every_encoding(encoding: Rounding, transport: Transport) -> None:
    engine = engine_of(PLAN)
    values = normal()
    rounded = whole(PLAN)
    rounded[NAME] = np.zeros(3000, wire_dtype(encoding, "float32"))
    data_transport: Transport = "data connection" if transport == "data connection" else "calls"
    with served(engine, transport=data_transport) as client:
        client.initialize(fence_of(client), values, INITIAL)
        where = (client.peer.rpartition(" ")[2], INCARNATION, PLAN, 0)
        other = (
            SharingClient(*where, plan=PLAN, wire=encoding)
            if transport == "shared memory"
            else ShardClient(*where)
        )
        with other:
            other.pull(fence_of(client), None, rounded)
    np.testing.assert_array_equal(rounded[NAME], round_to(values[NAME], encoding))
    np.testing.assert_array_equal(rounded[STATE], values[STATE])


def test_a_session_that_has_aged_is_replaced() -> None:
    with served(engine_of(PLAN), deadline_s=60) as client:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)
        client.pull(fence, None, whole(PLAN))
        first = client._exchanger._call
        assert first is not None
        first._aged_at = 0
        client.pull(fence, None, whole(PLAN))
        assert client._exchanger._call is not first
        assert first._call.done()


def test_a_segment_that_cannot_be_had_is_no_error() -> None:
    with served(engine_of(PLAN)) as client:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        workspace = Workspace(PLAN)
        assert workspace.segment is not None
        os.close(workspace.segment._fd)
        where = (client.peer.rpartition(" ")[2], INCARNATION, PLAN, 0)
        with ShardClient(*where, workspace=workspace) as other:
            other.pull(fence_of(client), None, workspace.sets[0])
            assert not other.shares_memory
    np.testing.assert_array_equal(workspace.sets[0][NAME], counting(PLAN)[NAME])
