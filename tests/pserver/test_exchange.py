"""The standing call: encodings, segments, what is refused, and exchanges without an answer."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any, Literal

import grpc
import numpy as np
import pytest

from pserver import wire
from pserver.arrival import Chunks
from pserver.client import Push, RetryPolicy, ShardClient
from pserver.engine import ShardEngine
from pserver.requests import PushResult
from pserver.server import ShardServer
from pserver.updates.numpy_engine import NumpyEngine
from pserver.workspace import Workspace
from psrpc.batch import BatchId
from psrpc.channel import open_channel
from psrpc.codec import encode_stream
from psrpc.encoding import (
    Encoded,
    Gradient,
    decode,
    encode_int8,
    encode_topk,
    round_to,
    wire_dtype,
)
from psrpc.errors import InvalidArgument, OutcomeUnknown, PsError, SegmentLost, ShardUnreachable
from psrpc.plan import Plan
from psrpc.status import error_from_rpc
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from tests.pserver.shards import (
    INCARNATION,
    ONE_TRY,
    SGD,
    NDArray,
    SharingClient,
    Sink,
    attaching,
    counting,
    engine_of,
    identity_of,
    part,
    plan_of,
    served,
    whole,
)

PLAN = plan_of(size=3000)
NAME, STATE = "float32.trainable", "float32.state"
BATCH = BatchId(0, 0, 10)

Rounding = Literal["bfloat16", "float16"]
Compression = Literal["int8", "topk"]


def normal(plan: Plan = PLAN) -> dict[str, NDArray]:
    rng = np.random.default_rng(3)
    arrays = whole(plan)
    for array in arrays.values():
        array[:] = rng.normal(size=len(array))
    return arrays


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


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("encoding", ["bfloat16", "float16", "int8", "topk"])
def test_gradients_in_every_encoding(
    encoding: Rounding | Compression, replicas: int, shared: bool
) -> None:
    gradient, meant = encoded(normal(), encoding)
    with served(engine_of(PLAN, replicas=replicas), shared=shared) as client:
        fence = client.fence(1, 1)
        client.initialize(fence, counting(PLAN))
        assert client.push(fence, Push("worker-1", BATCH, 1, 0, gradient)).version == 1 - replicas
        decision = types.Decision(
            generation=1, attempts=[types.Attempt(batch=wire.to_batch(BATCH), attempt=1)]
        )
        into = whole(PLAN)
        client.pull(
            fence, "worker-1", 1 if replicas else None, into, decision if replicas else None
        )
        assert client.shares_memory == shared
    np.testing.assert_array_equal(into[NAME], counting(PLAN)[NAME] - meant)
    np.testing.assert_array_equal(into[STATE], counting(PLAN)[STATE] + normal()[STATE])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("encoding", ["bfloat16", "float16"])
def test_values_in_every_encoding(encoding: Rounding, shared: bool) -> None:
    engine = engine_of(PLAN)
    values = normal()
    rounded = whole(PLAN)
    rounded[NAME] = np.zeros(3000, wire_dtype(encoding, "float32"))
    with served(engine) as client:
        client.initialize(client.fence(1, 1), values)
        where = (client.peer.rpartition(" ")[2], INCARNATION, PLAN, 0)
        other = SharingClient(*where, plan=PLAN, wire=encoding) if shared else ShardClient(*where)
        with other:
            other.pull(client.fence(1, 1), "worker-1", None, rounded)
    np.testing.assert_array_equal(rounded[NAME], round_to(values[NAME], encoding))
    np.testing.assert_array_equal(rounded[STATE], values[STATE])


def test_a_session_that_has_aged_is_replaced() -> None:
    with served(engine_of(PLAN), deadline_s=60) as client:
        fence = client.fence(1, 1)
        client.initialize(fence, counting(PLAN))
        client.pull(fence, "worker-1", None, whole(PLAN))
        first = client._exchanger._session
        assert first is not None
        first._aged_at = 0
        client.pull(fence, "worker-1", None, whole(PLAN))
        assert client._exchanger._session is not first
        assert first._call.done()


# -- no answer -------------------------------------------------------------------------------


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
        fence = client.fence(1, 1)
        client.initialize(fence, counting(PLAN))

        def push(batch: BatchId, arrived: threading.Event) -> PushResult:
            gradient = part(PLAN, normal())
            header = pb.PushHeader(
                fence=fence,
                batch=wire.to_batch(batch),
                examples=batch.count,
                extents=wire.to_extents(wire.gradient_extents(PLAN, gradient)),
            )

            def messages() -> Iterator[bytes]:
                yield from encode_stream(header, wire.gradient_parts(PLAN, gradient))
                arrived.set()

            found, pieces = wire.read_stream(messages(), pb.PushHeader)
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
    push = Push("worker-1", BATCH, 1, 0, part(PLAN, normal()))
    with served(engine, RetryPolicy(first_s=0.001, budget_s=30)) as client:
        fence = client.fence(1, 1)
        client.initialize(fence, counting(PLAN))
        where = (client.peer.rpartition(" ")[2], INCARNATION, PLAN, 0)
        with hasty_client(where, lambda hasty: hasty.push(fence, push), updates.entered) as hasty:
            assert not hasty.shares_memory
            another = Push("worker-1", BATCH, 1, 0, part(PLAN, counting(PLAN)))
            with pytest.raises(SegmentLost):
                hasty.push(fence, another)
            left = hasty.workspace.outbox[0][NAME][:12000].view(np.float32)
            np.testing.assert_array_equal(left, normal()[NAME])
            # What the worker left there is what the shard goes on with, whatever happens here.
            updates.go_on.set()
            assert client.push(fence, push).outcome == "already_applied"
        into = whole(PLAN)
        client.pull(fence, "worker-1", None, into)
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

    with served(engine, shared=True) as client:
        fence = client.fence(1, 1)
        client.initialize(fence, counting(PLAN))
        push = Push("worker-1", BATCH, 1, 0, part(PLAN, normal()))
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            client.push(fence, push)
        interrupting.join()
        updates.go_on.set()
        with pytest.raises(SegmentLost, match="KeyboardInterrupt"):
            client.push(fence, push)


def test_without_an_answer_chunks_are_sent_again(updates: Blocking) -> None:
    engine = ShardEngine(identity_of(0), PLAN, updates, Sink())
    heard: list[str] = []
    push = Push("worker-1", BATCH, 1, 0, part(PLAN, normal()))
    with served(engine) as client:
        fence = client.fence(1, 1)
        client.initialize(fence, counting(PLAN))
        address = client.peer.rpartition(" ")[2]

        def announce(reason: str) -> None:
            heard.append(reason)
            updates.go_on.set()

        retry = RetryPolicy(first_s=0.001, budget_s=30)
        with ShardClient(
            address, INCARNATION, PLAN, 0, retry=retry, deadline_s=0.05, announce=announce
        ) as hasty:
            assert hasty.push(fence, push).outcome == "already_applied"
    assert "DEADLINE_EXCEEDED" in heard[0]


@pytest.mark.parametrize("shared", [False, True])
def test_a_conversation_that_ends_while_it_is_idle_is_begun_anew(shared: bool) -> None:
    server = ShardServer(0, "127.0.0.1:0")
    port = server.start()
    server.open(engine_of(PLAN))
    where = (f"127.0.0.1:{port}", INCARNATION, PLAN, 0)
    retry = RetryPolicy(first_s=0.001, budget_s=30)
    client = (
        SharingClient(*where, plan=PLAN, retry=retry)
        if shared
        else ShardClient(*where, retry=retry)
    )
    with client:
        fence = client.fence(1, 1)
        client.initialize(fence, counting(PLAN))
        client.pull(fence, "worker-1", None, whole(PLAN))
        session = client._exchanger._session
        assert session is not None
        # With a grace period that nobody would wait for.
        server.stop(grace_s=3600)
        while session.usable:
            threading.Event().wait(0.001)
        with ShardServer(0, f"127.0.0.1:{port}") as again:
            again.open(engine_of(PLAN))
            client.initialize(fence, counting(PLAN))
            client.pull(fence, "worker-1", None, whole(PLAN))
        assert client.shares_memory == shared


@pytest.mark.parametrize("shared", [False, True])
def test_a_call_that_is_cancelled_ends_at_once(updates: Blocking, shared: bool) -> None:
    engine = ShardEngine(identity_of(0), PLAN, updates, Sink())
    push = Push("worker-1", BATCH, 1, 0, part(PLAN, normal()))
    with served(engine, shared=shared) as client:
        fence = client.fence(1, 1)
        client.initialize(fence, counting(PLAN))

        def cancel() -> None:
            assert updates.entered.wait(30)
            client.cancel()

        cancelling = threading.Thread(target=cancel)
        cancelling.start()
        with pytest.raises(SegmentLost if shared else OutcomeUnknown, match="CANCELLED"):
            client.push(fence, push)
        cancelling.join()
        updates.go_on.set()


def test_a_push_that_was_never_answered_has_an_unknown_outcome(updates: Blocking) -> None:
    engine = ShardEngine(identity_of(0), PLAN, updates, Sink())
    push = Push("worker-1", BATCH, 1, 0, part(PLAN, normal()))
    with served(engine) as client:
        fence = client.fence(1, 1)
        client.initialize(fence, counting(PLAN))
        where = (client.peer.rpartition(" ")[2], INCARNATION, PLAN, 0)
        unknown = pytest.raises(OutcomeUnknown, match=r"shard 0 at .* push of epoch .* is safe")
        with ShardClient(*where, retry=ONE_TRY, deadline_s=0.05) as hasty, unknown:
            hasty.push(fence, push)
        updates.go_on.set()


def test_a_push_that_was_never_sent_changed_nothing() -> None:
    with ShardServer(0, "127.0.0.1:0") as server:
        where = (f"127.0.0.1:{server.port}", INCARNATION, PLAN, 0)
    with ShardClient(*where, retry=ONE_TRY) as client, pytest.raises(ShardUnreachable):
        client.push(client.fence(1, 1), Push("worker-1", BATCH, 1, 0, part(PLAN, normal())))


def test_after_closing_there_are_no_exchanges() -> None:
    with served(engine_of(PLAN), RetryPolicy(budget_s=30)) as client:
        client.close()
        with pytest.raises(PsError, match="was closed here"):
            client.pull(client.fence(1, 1), "worker-1", None, whole(PLAN))


# -- what is refused -------------------------------------------------------------------------


class Raw:
    """A bare standing call."""

    def __init__(self, engine: ShardEngine, client: ShardClient, channel: grpc.Channel) -> None:
        self.engine = engine
        self.fence = client.fence(1, 1)
        self.client = client
        self._call = channel.stream_stream(f"/{wire.SERVICE}/Exchange")  # type: ignore[call-arg]

    def push(self, **change: object) -> pb.PushHeader:
        fields: dict[str, object] = {
            "fence": self.fence,
            "batch": wire.to_batch(BATCH),
            "examples": BATCH.count,
            "extents": wire.to_extents(wire.gradient_extents(PLAN, part(PLAN, whole(PLAN)))),
        }
        return pb.PushHeader(**(fields | change))  # type: ignore[arg-type]

    def refusal(self, *headers: pb.ExchangeHeader) -> str:
        return self.refusal_of([m for header in headers for m in encode_stream(header, ())])

    def refusal_of(self, messages: list[bytes]) -> str:
        with pytest.raises(grpc.RpcError) as caught:
            list(self._call(iter(messages), timeout=30))
        error = error_from_rpc(caught.value, "the shard")
        assert isinstance(error, InvalidArgument), error
        return str(error)


@pytest.fixture
def raw() -> Iterator[Raw]:
    engine = engine_of(PLAN)
    with served(engine) as client, open_channel(client.peer.rpartition(" ")[2]) as channel:
        client.initialize(client.fence(1, 1), counting(PLAN))
        yield Raw(engine, client, channel)
        into = whole(PLAN)
        client.pull(client.fence(1, 1), "worker-1", None, into)
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
                push=raw.push(skipped=True, extents=[]), pull=pb.PullRequest(round=1)
            ),
            "a pull with a push is of the newest values",
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


def test_a_segment_that_cannot_be_had_is_no_error() -> None:
    with served(engine_of(PLAN)) as client:
        client.initialize(client.fence(1, 1), counting(PLAN))
        workspace = Workspace(PLAN)
        assert workspace.segment is not None
        os.close(workspace.segment._fd)
        where = (client.peer.rpartition(" ")[2], INCARNATION, PLAN, 0)
        with ShardClient(*where, workspace=workspace) as other:
            other.pull(client.fence(1, 1), "worker-1", None, workspace.sets[0])
            assert not other.shares_memory
    np.testing.assert_array_equal(workspace.sets[0][NAME], counting(PLAN)[NAME])
