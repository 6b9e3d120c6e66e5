"""Exchanges without an answer: what a client knows of them, and what it does next."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pserver.client.client import RetryPolicy, ShardClient
from pserver.client.exchanger import Exchanger
from pserver.core.requests import PushResult
from pserver.engine.engine import ShardEngine
from pserver.server.server import ShardServer
from pserver.transport.grpc_stream import Chunks, read_stream
from pserver.transport.transport import TransportChoice
from pserver.updates.numpy_engine import NumpyEngine
from pserver.wire import messages as wire
from pserver.wire import streams
from psrpc.core.batch import BatchId
from psrpc.core.errors import OutcomeUnknown, PsError, SegmentLost, ShardUnreachable
from psrpc.core.plan import Plan
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.wire.codec import encode_stream
from psrpc.wire.commands import to_batch
from tests.pserver.exchanges import BATCH, NAME, PLAN, normal
from tests.pserver.shards import (
    INCARNATION,
    INITIAL,
    ONE_TRY,
    SGD,
    TRANSPORTS,
    NDArray,
    SharingClient,
    Sink,
    Transport,
    counting,
    engine_of,
    fence_of,
    identity_of,
    leased,
    part,
    served,
    whole,
)


class Blocking(NumpyEngine):
    """An update engine that stands still in the first update until it is told to go on."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(SGD, plan, 0)
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def apply(self, gradients: Mapping[str, NDArray], rate_scale: float = 1.0) -> None:
        self.entered.set()
        assert self.go_on.wait(30)
        super().apply(gradients, rate_scale)


@pytest.fixture
def updates() -> Iterator[Blocking]:
    updates = Blocking(PLAN)
    yield updates
    updates.go_on.set()


def test_a_push_arrives_while_another_is_applied(updates: Blocking) -> None:
    engine = ShardEngine(identity_of(0), PLAN, updates, Sink())
    with served(engine) as client, ThreadPoolExecutor(2) as threads:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)

        def push(batch: BatchId, arrived: threading.Event) -> PushResult:
            gradient = part(PLAN, normal())
            header = pb.PushHeader(
                fence=fence,
                batch=to_batch(batch),
                examples=batch.count,
                extents=streams.to_extents(streams.gradient_extents(PLAN, gradient)),
            )

            def messages() -> Iterator[bytes]:
                yield from encode_stream(header, streams.gradient_parts(PLAN, gradient))
                arrived.set()

            found, pieces = read_stream(messages(), pb.PushHeader)
            return engine.push(wire.from_push(found), Chunks(pieces), 30)

        first = threads.submit(push, BATCH, threading.Event())
        assert updates.entered.wait(30)
        arrived = threading.Event()
        second = threads.submit(push, BatchId(0, 10, 10), arrived)
        came = arrived.wait(10)
        updates.go_on.set()
        assert came
        assert (first.result(30).version, second.result(30).version) == (1, 2)


@contextmanager
def hasty_client(
    where: tuple[Any, ...], call: Callable[[ShardClient], object], entered: threading.Event
) -> Iterator[SharingClient]:
    """A client that has lost patience with a shard that was at it, as fast as this machine lets
    it come so far."""
    deadline_s = 0.05
    while True:
        with SharingClient(*where, plan=PLAN, deadline_s=deadline_s, retry=ONE_TRY) as client:
            with pytest.raises(PsError) as caught:
                call(client)
            if entered.is_set():
                assert isinstance(caught.value, SegmentLost)
                assert "no answer to an exchange through shared memory" in str(caught.value)
                yield client
                return
        deadline_s *= 2


def test_without_an_answer_the_segment_is_given_up(updates: Blocking) -> None:
    engine = ShardEngine(identity_of(0), PLAN, updates, Sink())
    push = leased("worker-1", BATCH, 1, 0, part(PLAN, normal()))
    with served(engine, RetryPolicy(first_s=0.001, budget_s=30)) as client:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)
        where = (client.peer.rpartition(" ")[2], INCARNATION, PLAN, 0)
        with hasty_client(where, lambda hasty: hasty.push(fence, push), updates.entered) as hasty:
            assert not hasty.shares_memory
            another = leased("worker-1", BATCH, 1, 0, part(PLAN, counting(PLAN)))
            with pytest.raises(SegmentLost):
                hasty.push(fence, another)
            left = hasty.workspace.outbox[0][NAME][:12000].view(np.float32)
            np.testing.assert_array_equal(left, normal()[NAME])
            # What the worker left there is what the shard goes on with, whatever happens here.
            updates.go_on.set()
            assert client.push(fence, push).outcome == "already_applied"
        into = whole(PLAN)
        client.pull(fence, None, into)
    np.testing.assert_array_equal(into[NAME], counting(PLAN)[NAME] - normal()[NAME])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where this process was started in the background and ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_exchange_that_was_interrupted_has_no_answer(updates: Blocking) -> None:
    engine = ShardEngine(identity_of(0), PLAN, updates, Sink())

    def interrupt() -> None:
        assert updates.entered.wait(30)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with served(engine, transport="shared memory") as client:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)
        push = leased("worker-1", BATCH, 1, 0, part(PLAN, normal()))
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            client.push(fence, push)
        interrupting.join()
        updates.go_on.set()
        with pytest.raises(SegmentLost, match="KeyboardInterrupt"):
            client.push(fence, push)


@pytest.mark.parametrize("transport", ["calls", "data connection"])
def test_without_an_answer_tensors_are_sent_again(updates: Blocking, transport: Transport) -> None:
    engine = ShardEngine(identity_of(0), PLAN, updates, Sink())
    heard: list[str] = []
    push = leased("worker-1", BATCH, 1, 0, part(PLAN, normal()))
    with served(engine, transport=transport) as client:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)
        address = client.peer.rpartition(" ")[2]

        def announce(reason: str) -> None:
            heard.append(reason)
            updates.go_on.set()

        retry = RetryPolicy(first_s=0.001, budget_s=30)
        with ShardClient(
            address, INCARNATION, PLAN, 0, retry=retry, deadline_s=0.05, announce=announce
        ) as hasty:
            assert hasty.push(fence, push).outcome == "already_applied"
    assert "no answer in time" in heard[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_conversation_that_ends_while_it_is_idle_is_begun_anew(transport: Transport) -> None:
    data_port = 0 if transport == "data connection" else None
    server = ShardServer(0, "127.0.0.1:0", data_port=data_port)
    port = server.start()
    server.open(engine_of(PLAN))
    where = (f"127.0.0.1:{port}", INCARNATION, PLAN, 0)
    retry = RetryPolicy(first_s=0.001, budget_s=30)
    client = (
        SharingClient(*where, plan=PLAN, retry=retry)
        if transport == "shared memory"
        else ShardClient(*where, retry=retry)
    )
    with client:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)
        client.pull(fence, None, whole(PLAN))
        call = client._exchanger._call
        assert call is not None
        # With a grace period too long to wait out.
        server.stop(grace_s=3600)
        while call.usable:
            threading.Event().wait(0.001)
        with ShardServer(0, f"127.0.0.1:{port}") as again:
            again.open(engine_of(PLAN))
            client.initialize(fence, counting(PLAN), INITIAL)
            client.pull(fence, None, whole(PLAN))
        assert client.shares_memory == (transport == "shared memory")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_call_that_is_cancelled_ends_at_once(updates: Blocking, transport: Transport) -> None:
    engine = ShardEngine(identity_of(0), PLAN, updates, Sink())
    push = leased("worker-1", BATCH, 1, 0, part(PLAN, normal()))
    with served(engine, transport=transport) as client:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)

        def cancel() -> None:
            assert updates.entered.wait(30)
            client.cancel()

        cancelling = threading.Thread(target=cancel)
        cancelling.start()
        lost = SegmentLost if transport == "shared memory" else OutcomeUnknown
        with pytest.raises(lost, match="CANCELLED"):
            client.push(fence, push)
        cancelling.join()
        updates.go_on.set()


def test_a_push_that_was_never_answered_has_an_unknown_outcome(updates: Blocking) -> None:
    engine = ShardEngine(identity_of(0), PLAN, updates, Sink())
    push = leased("worker-1", BATCH, 1, 0, part(PLAN, normal()))
    with served(engine) as client:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)
        where = (client.peer.rpartition(" ")[2], INCARNATION, PLAN, 0)
        unknown = pytest.raises(OutcomeUnknown, match=r"shard 0 at .* push of epoch .* is safe")
        with ShardClient(*where, retry=ONE_TRY, deadline_s=0.05) as hasty, unknown:
            hasty.push(fence, push)
        updates.go_on.set()


def test_a_push_that_was_never_sent_changed_nothing() -> None:
    with ShardServer(0, "127.0.0.1:0") as server:
        where = (f"127.0.0.1:{server.port}", INCARNATION, PLAN, 0)
    with ShardClient(*where, retry=ONE_TRY) as client, pytest.raises(ShardUnreachable):
        client.push(fence_of(client), leased("worker-1", BATCH, 1, 0, part(PLAN, normal())))


def test_after_closing_there_are_no_exchanges() -> None:
    with served(engine_of(PLAN), RetryPolicy(budget_s=30)) as client:
        client.close()
        with pytest.raises(PsError, match="was closed here"):
            client.pull(fence_of(client), None, whole(PLAN))


class Fleeting(Exchanger):
    """Its call ends as soon as another thread has looked at its transport."""

    def __init__(self) -> None:
        self._kept: Any = SimpleNamespace(choice=TransportChoice("shared memory"))

    @property
    def _transport(self) -> Any:  # type: ignore[override]
        found, self._kept = self._kept, None
        return found


def test_the_transport_may_be_asked_for_while_a_call_ends() -> None:
    exchanger = Fleeting()
    assert exchanger.attached
    assert not exchanger.attached
