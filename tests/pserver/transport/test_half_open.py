"""Pushes that are announced and do not come: they keep no buffer for long, and one worker's never
keep those of others."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from typing import Any

import grpc
import numpy as np
import pytest

from coordinator.certificates.authority import make_certificates
from pserver.client.client import ShardClient
from pserver.engine.buffers import BufferPool, Loan, worker_quota
from pserver.engine.engine import ShardEngine
from pserver.transport.byte_stream import PlainStream
from pserver.transport.data_connection import DataConnection
from pserver.transport.grpc_stream import read_stream
from pserver.transport.progress import AwaitedMessages, TransferProgress
from pserver.wire import messages as wire
from psrpc.core.errors import NotReady, Stalled
from psrpc.net.channel import open_channel
from psrpc.net.limits import PROGRESS_BYTES, PROGRESS_S
from psrpc.security.credentials import Security
from psrpc.security.identity import Role
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.wire.codec import encode_stream
from psrpc.wire.status import error_from_rpc
from tests.pserver.data_connections import in_use, pushing
from tests.pserver.exchanges import BATCH, NAME, PLAN, normal
from tests.pserver.shards import (
    INITIAL,
    Transport,
    counting,
    engine_of,
    fence_of,
    granted,
    leased,
    part,
    served,
    whole,
)

WAIT_S = 30.0


# -- the rule --------------------------------------------------------------------------------


def test_a_slow_but_steady_transfer_is_never_cut() -> None:
    progress, now = TransferProgress(0.0), 0.0
    for _ in range(1000):
        now += PROGRESS_S - 0.1
        assert progress.left_s(now) > 0
        progress.received(PROGRESS_BYTES, now)


def test_many_small_pieces_are_as_good_as_a_large_one() -> None:
    progress, now = TransferProgress(0.0), 0.0
    for _ in range(10 * PROGRESS_BYTES // 1024):
        now += 0.9 * PROGRESS_S * 1024 / PROGRESS_BYTES
        assert progress.left_s(now) > 0
        progress.received(1024, now)


def test_a_byte_now_and_then_is_no_progress() -> None:
    progress = TransferProgress(0.0)
    for second in range(int(PROGRESS_S)):
        progress.received(1, second)
    with pytest.raises(Stalled, match=r"30 bytes in 30 s, after 0; expected 65536"):
        progress.left_s(PROGRESS_S)


def test_messages_that_bring_nothing_are_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wakes the reader, and the time that is left is no more than before."""
    times = iter(np.arange(0.0, 99.0, 9.0))
    monkeypatch.setattr("pserver.transport.grpc_stream.time.monotonic", lambda: 0.0)
    monkeypatch.setattr("pserver.transport.progress.time.monotonic", lambda: next(times))
    header = pb.PushGradientsRequest(header=pb.PushHeader()).SerializeToString()

    def messages() -> Iterator[bytes]:
        yield header
        while True:
            yield b""

    _, pieces = read_stream(messages(), pb.PushHeader, paced=True)
    with pytest.raises(Stalled):
        next(pieces)


def test_an_error_of_the_iterator_is_raised_where_it_is_waited_for() -> None:
    def messages() -> Iterator[bytes]:
        yield b"one"
        raise grpc.RpcError

    awaited, progress = AwaitedMessages(messages()), TransferProgress(time.monotonic())
    assert awaited.next(progress) == b"one"
    with pytest.raises(grpc.RpcError):
        awaited.next(progress)


# -- what one worker may hold ----------------------------------------------------------------


def test_one_worker_never_has_all_buffers() -> None:
    assert [worker_quota(size) for size in (2, 3, 4, 16)] == [1, 1, 2, 2]


def test_a_worker_that_holds_its_quota_waits_and_others_do_not() -> None:
    pool = BufferPool(PLAN, 0, 4)
    with pool.loan(0, worker="bad"), pool.loan(0, worker="bad"):
        refused = "bad has 2 of 4 buffers for pushes that are still on their way"
        with pytest.raises(NotReady, match=refused), pool.loan(0.001, worker="bad"):
            pass
        with pool.loan(0, worker="good"):
            assert pool.in_use == 3
    with pool.loan(0, worker="bad"):
        assert pool.in_use == 1


def test_a_completed_arrival_counts_no_more() -> None:
    """One worker may have all micro-batches of a round to do."""
    pool = BufferPool(PLAN, 0, 4)
    for _ in range(4):
        with pool.loan(0, worker="only") as loan:
            loan.keep = True
    assert pool.in_use == 4


def test_a_worker_that_waits_for_its_own_buffer_gets_it() -> None:
    pool = BufferPool(PLAN, 0, 2)
    with ThreadPoolExecutor(1) as threads:
        with pool.loan(0, worker="w"):
            began = threading.Event()

            def again() -> int:
                with pool.loan(WAIT_S, began.set, worker="w"):
                    return pool.in_use

            waiting = threads.submit(again)
            assert began.wait(WAIT_S)
        assert waiting.result(WAIT_S) == 1


# -- over the network ------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> ShardEngine:
    """A shard with two buffers, as one with large parameters has."""
    monkeypatch.setattr("pserver.engine.intake.pool_size", lambda _nbytes, _replicas: 2)
    return engine_of(PLAN)


@contextmanager
def half_open(address: str, method: str, header: pb.ExchangeHeader) -> Iterator[Any]:
    """A call that announces tensors and then says nothing, for as long as the block lasts."""
    over = threading.Event()
    message: pb.ExchangeHeader | pb.PushHeader | pb.InitializeHeader = header
    if method == "PushGradients":
        message = header.push
    elif method == "Initialize":
        message = pb.InitializeHeader(
            fence=header.push.fence, extents=header.push.extents, grant=INITIAL
        )

    def requests() -> Iterator[bytes]:
        yield from encode_stream(message, ())
        over.wait(WAIT_S)

    with open_channel(address) as channel:
        call = channel.stream_unary(f"/{wire.SERVICE}/{method}")  # type: ignore[call-arg]
        try:
            yield call.future(requests(), timeout=WAIT_S)
        finally:
            over.set()


def asking(engine: ShardEngine) -> threading.Semaphore:
    """Is released for each push that asks for a buffer."""
    asked, pool = threading.Semaphore(0), engine._intake.pool
    loan = pool.loan

    @contextmanager
    def asks(*args: Any, **options: Any) -> Iterator[Loan]:
        asked.release()
        with loan(*args, **options) as lent:
            yield lent

    pool.loan = asks  # type: ignore[method-assign]
    return asked


def announced(client: ShardClient, worker: str) -> pb.ExchangeHeader:
    header = pushing(client)
    header.push.fence.CopyFrom(fence_of(client, worker=worker))
    granted(header.push, worker)
    return header


def address_of(client: ShardClient) -> str:
    return client.peer.rpartition(" ")[2]


@pytest.mark.parametrize("method", ["PushGradients", "Exchange"])
@pytest.mark.parametrize("transport", ["calls", "data connection", "shared memory"])
def test_others_push_while_one_worker_holds_its_quota_half_open(
    few: ShardEngine, transport: Transport, method: str
) -> None:
    with served(few, transport=transport) as client, ExitStack() as held:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)
        address = address_of(client)
        asked = asking(few)
        # gRPC ends a call without references.
        calls = [
            held.enter_context(half_open(address, method, announced(client, "bad")))
            for _ in range(8)
        ]
        assert all(asked.acquire(timeout=WAIT_S) for _ in range(8))
        pushed = client.push(fence, leased("worker-1", BATCH, 1, 0, part(PLAN, normal())))
        assert pushed.outcome == "applied"
        into = whole(PLAN)
        client.pull(fence, None, into)
        np.testing.assert_array_equal(into[NAME], counting(PLAN)[NAME] - normal()[NAME])
        assert few._intake.pool.in_use == 1, "the one that is half open"
        assert not any(call.done() for call in calls)


def test_half_open_initializations_keep_no_buffer_of_a_shard_that_trains(few: ShardEngine) -> None:
    with served(few) as client, ExitStack() as held:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        calls = [
            held.enter_context(half_open(address_of(client), "Initialize", pushing(client)))
            for _ in range(8)
        ]
        for call in calls:
            assert pb.InitializeResponse.FromString(call.result(WAIT_S)).already
        assert few._intake.pool.in_use == 0


@pytest.mark.parametrize("method", ["PushGradients", "Exchange", "Initialize"])
def test_a_call_that_stands_still_gives_its_buffer_back_and_says_why(
    few: ShardEngine, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pserver.transport.progress.PROGRESS_S", 0.05)
    with served(few) as client:
        if method != "Initialize":
            client.initialize(fence_of(client), counting(PLAN), INITIAL)
        with half_open(address_of(client), method, pushing(client)) as call:
            error = call.exception(WAIT_S)
            assert isinstance(error, grpc.RpcError)
            named = error_from_rpc(error, "shard 0")
        assert isinstance(named, Stalled)
        assert "stopped coming: 0 bytes in 0.05 s" in str(named)
        assert few._intake.pool.in_use == 0


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Security, Security]:
    """A shard's and a worker's."""
    directory = tmp_path_factory.mktemp("certs") / "tiny"
    make_certificates(directory, "tiny", datetime.now(UTC))
    return (
        Security.from_options(Role.SHARD, directory),
        Security.from_options(Role.WORKER, directory),
    )


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("sent", [0, 100])
def test_a_data_connection_that_stands_still_gives_its_buffer_back_and_says_why(
    sent: int,
    sealed: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr("pserver.transport.data_listener.PROGRESS_S", 0.05)
    security: tuple[Security, ...] = request.getfixturevalue("secured") if sealed else ()
    with in_use(*security) as (session, connection, client):
        message = pushing(client).SerializeToString()
        connection.send(message, [memoryview(bytes(sent))])
        with pytest.raises(Stalled) as ended:
            next(session._call.answers())
        assert f"stopped coming: {sent} bytes in 0.05 s" in str(ended.value) or sealed
        # A worker between two steps announces nothing, and may take its time.
        assert client.get_status().version == 0


def test_a_worker_may_be_silent_between_two_exchanges() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, closing(DataConnection(far, "a worker", limit_s=0.001)) as connection:
        waited, stream = threading.Semaphore(0), connection._stream
        assert isinstance(stream, PlainStream)
        receive = stream._receive

        def looked(view: memoryview, left_s: float | None) -> int:
            try:
                return receive(view, left_s)
            finally:
                waited.release()

        stream._receive = looked  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as threads:
            message = threads.submit(connection.receive_message)
            assert all(waited.acquire(timeout=WAIT_S) for _ in range(3))
            near.sendall(b"\x02\0\0\0ab")
            assert message.result(WAIT_S) == b"ab"
