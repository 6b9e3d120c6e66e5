"""Messages in shared memory: their visibility, and that every sleep ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pserver.client.client import ShardClient
from pserver.server.server import ShardServer
from pserver.server.servicer import Conversation
from pserver.transport import mailbox
from pserver.transport.grpc_stream import ShardStream
from pserver.transport.mailbox import HEAD_BYTES, ShardBox, WorkerBox
from pserver.transport.worker_memory import WorkerMemory
from pserver.transport.workspace import Workspace
from psrpc.core.errors import InvalidArgument, StaleGeneration
from psrpc.core.plan import aligned_empty
from psrpc.ops.retry import RetryPolicy
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.codec import encode_stream
from tests.pserver.exchanges import BATCH, PLAN
from tests.pserver.shards import (
    INCARNATION,
    INITIAL,
    ONE_TRY,
    NDArray,
    SharingClient,
    attaching,
    counting,
    engine_of,
    fence_of,
    leased,
    part,
    served,
    whole,
)

ROOM = 64

pytestmark = pytest.mark.skipif(not mailbox.has_futex(), reason="this system has no futex")


def never() -> bool:
    return False


@pytest.fixture
def memory() -> NDArray:
    found = aligned_empty(HEAD_BYTES + ROOM, "uint8")
    # What an earlier worker of the segment has left.
    found[:] = 255
    return found


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def test_requests_and_answers_take_turns(memory: NDArray, pool: ThreadPoolExecutor) -> None:
    worker = WorkerBox(memory)
    shard = ShardBox(memory, worker.session)

    def serve() -> list[bytes | None]:
        heard = []
        for _ in range(200):
            heard.append(shard.receive(never))
            shard.answer(b"to " + (heard[-1] or b""))
        return heard

    served = pool.submit(serve)
    sent = [b"%d" % number for number in range(200)]
    assert [worker.exchange(message, never) for message in sent] == [b"to " + m for m in sent]
    assert served.result(30) == sent


def test_a_sender_is_told_when_it_is_the_shards_turn(memory: NDArray) -> None:
    worker = WorkerBox(memory)
    shard = ShardBox(memory, worker.session)

    def sent() -> None:
        # All over, so neither side waits: the request is here, and its answer is yet to come.
        shard.answer(b"to " + (shard.receive(lambda: True) or b""))

    assert worker.exchange(b"one", lambda: True, sent) == b"to one"


def test_a_request_that_comes_by_grpc_is_announced(memory: NDArray) -> None:
    worker = WorkerBox(memory)
    shard = ShardBox(memory, worker.session)
    worker.call_to_stream()
    assert shard.receive(never) == b""


def test_a_request_of_another_call_is_left_alone(memory: NDArray) -> None:
    worker = WorkerBox(memory)
    earlier = ShardBox(memory, worker.session ^ 1)
    shard = ShardBox(memory, worker.session)
    worker.call_to_stream()
    assert shard.receive(never) == b""
    assert earlier.receive(lambda: True) is None


@pytest.mark.parametrize("side", ["worker", "shard"])
def test_the_end_of_the_call_wakes_a_sleeping_side(
    side: str, memory: NDArray, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep, over = threading.Event(), threading.Event()
    slept: list[float] = []
    sleep = mailbox.wait_for_change

    def wait(word: NDArray, expected: int, _timeout_s: float) -> None:
        slept.append(1)
        asleep.set()
        # For good, if it is not woken.
        while not over.is_set():
            sleep(word, expected, 60)

    monkeypatch.setattr(mailbox, "wait_for_change", wait)
    worker = WorkerBox(memory)
    shard = ShardBox(memory, worker.session)
    if side == "worker":
        found = pool.submit(worker.exchange, b"question", over.is_set)
    else:
        found = pool.submit(shard.receive, over.is_set)
    assert asleep.wait(30)
    over.set()
    while not found.done():
        (worker if side == "worker" else shard).wake()
    assert (found.result(), slept) == (None, [1])


def test_messages_without_room(memory: NDArray) -> None:
    worker = WorkerBox(memory)
    shard = ShardBox(memory, worker.session)
    assert worker.fits(bytes(ROOM))
    assert not worker.fits(bytes(ROOM + 1))
    assert not worker.fits(b"")
    with pytest.raises(InvalidArgument, match=r"answer has 65 bytes, the mailbox room for 64"):
        shard.answer(bytes(ROOM + 1))
    # Nothing in shared memory is believed.
    worker.call_to_stream()
    memory[:HEAD_BYTES].view(np.uint32)[mailbox._LENGTH] = ROOM + 1
    with pytest.raises(InvalidArgument, match=r"a message of 65 bytes.* at most 64"):
        shard.receive(never)


class Counted:
    """How many messages a client has left and sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = self.announced = 0
        leave, announce = WorkerBox.exchange, WorkerBox.call_to_stream

        def left(
            box: WorkerBox, message: bytes, over: Callable[[], bool], sent: Callable[[], object]
        ) -> bytes | None:
            self.left += 1
            return leave(box, message, over, sent)

        def announced(box: WorkerBox) -> None:
            self.announced += 1
            announce(box)

        monkeypatch.setattr(WorkerBox, "exchange", left)
        monkeypatch.setattr(WorkerBox, "call_to_stream", announced)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_short_messages_are_left_and_long_ones_sent(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(engine_of(PLAN), transport="shared memory") as client:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)
        into = whole(PLAN)
        client.pull(fence, None, into)
        push = leased("worker-1", BATCH, 1, 0, part(PLAN, counting(PLAN)))
        assert client.push(fence, push).outcome == "applied"
        assert (counted.left, counted.announced) == (2, 0)
        monkeypatch.setattr(WorkerBox, "fits", lambda _box, _message: False)
        client.pull(fence, None, into)
        assert client.push(fence, push).outcome == "already_applied"
        assert (counted.left, counted.announced) == (2, 2)
        monkeypatch.undo()
        client.pull(fence, None, into)
    np.testing.assert_array_equal(into["float32.state"], 2 * counting(PLAN)["float32.state"])


def test_an_error_ends_the_call_and_the_next_one_goes_on(counted: Counted) -> None:
    with served(engine_of(PLAN), transport="shared memory") as client:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)
        into = whole(PLAN)
        for _ in range(2):
            with pytest.raises(StaleGeneration):
                client.pull(fence_of(client, 2), None, into)
            client.pull(fence, None, into)
            assert client.shares_memory
    assert counted.left == 4


def test_a_worker_that_leaves_makes_room_for_the_next(counted: Counted) -> None:
    """A shard that slept in the mailbox of a call that is over would keep its place for good."""
    patient = RetryPolicy(first_s=0.001, budget_s=60)
    with ShardServer(0, "127.0.0.1:0", conversations=1) as server:
        server.open(engine_of(PLAN))
        where = (f"127.0.0.1:{server.port}", INCARNATION, PLAN, 0)
        for _ in range(3):
            with SharingClient(*where, plan=PLAN, retry=patient) as client:
                fence = fence_of(client)
                client.initialize(fence, counting(PLAN), INITIAL)
                client.pull(fence, None, whole(PLAN))
    assert counted.left == 3


def test_a_system_without_it_sends_everything(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "has_futex", lambda: False)
    with served(engine_of(PLAN), transport="shared memory") as client:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)
        client.pull(fence, None, whole(PLAN))
        assert client.shares_memory
    assert (counted.left, counted.announced) == (0, 0)


@pytest.mark.parametrize(
    ("at", "nbytes", "words"),
    [
        (0, 4096, "0 of the shared segment|at offset 0"),
        (4096 + 32, 4096, "expected a multiple of 64"),
        (4096, 1 << 40, "expected them between"),
    ],
)
def test_a_mailbox_that_is_none(at: int, nbytes: int, words: str) -> None:
    workspace = Workspace(PLAN)
    attach = attaching(workspace)
    attach.attach.mailbox_at, attach.attach.mailbox_nbytes = at, nbytes
    messages = encode_stream(attach, ())
    conversation = Conversation(engine_of(PLAN), ShardStream(messages, PLAN))
    with pytest.raises(InvalidArgument, match=words):
        list(conversation.answers(lambda: 30))
    workspace.close()


def test_values_in_chunks_do_not_go_into_a_mailbox() -> None:
    big = counting(PLAN)
    with ShardServer(0, "127.0.0.1:0") as server:
        engine = engine_of(PLAN)
        server.open(engine)
        where = (f"127.0.0.1:{server.port}", INCARNATION, PLAN, 0)
        with (
            SharingClient(*where, plan=PLAN, retry=ONE_TRY) as client,
            ShardClient(*where) as other,
        ):
            fence = fence_of(other)
            other.initialize(fence, big, INITIAL)
            client.pull(fence, None, whole(PLAN))
            end = client._exchanger._transport
            assert isinstance(end, WorkerMemory)
            assert end._box is not None
            pull = pb.PullRequest(fence=fence, newest=True, encoding=types.ENCODING_PLAIN)
            messages = encode_stream(pb.ExchangeHeader(pull=pull), ())
            with pytest.raises(InvalidArgument, match="do not go into a mailbox"):
                list(end._send(messages, True, lambda: None))
