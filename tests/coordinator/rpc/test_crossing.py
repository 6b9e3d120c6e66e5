"""A coordinator whose job's loop is held up: who is answered all the same, and what comes of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.client.client import CoordinatorClient
from coordinator.membership.membership import LEASE_S
from coordinator.rpc import heartbeat_bridge as crossing
from coordinator.rpc.heartbeat_bridge import Crossing, LoopThread, Pulse
from psrpc import SOFTWARE
from psrpc.core.errors import DeadlinePassed, NotReady
from psrpc.net.health import why_unhealthy
from psrpc.ops.clock import ManualClock
from psrpc.security.signatures import SECRET_BYTES
from psrpc.v1 import coordinator_pb2 as pb
from tests.coordinator.builders import SHA, Served, make_run, serving

LONG_S = 30.0
SERVICE = "psrpc.v1.Coordinator"
WORKER = "worker-0"
CONTEXT = SimpleNamespace(auth_context=dict, peer=str)


@contextmanager
def held_up(served: Served) -> Iterator[None]:
    """The job's loop does nothing for the length of a block."""
    held, released = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert released.wait(LONG_S)

    served.loop.call_soon_threadsafe(hold)
    assert held.wait(LONG_S)
    try:
        yield
    finally:
        released.set()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def served(tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(crossing, "BUSY_S", 0.01)
    with serving(make_run(tmp_path), clock) as found:
        yield found


@pytest.fixture
def client(served: Served) -> Iterator[CoordinatorClient]:
    with CoordinatorClient(served.address) as found:
        yield found


def _join(client: CoordinatorClient) -> tuple[pb.HeartbeatWorkerRequest, pb.HeartbeatShardRequest]:
    """A worker and a shard; returns their signs of life."""
    session = client.register_worker(
        pb.RegisterWorkerRequest(
            incarnation=7,
            host="h",
            pid=1,
            device="cpu",
            job_sha256=SHA,
            software=SOFTWARE,
            secret=bytes(SECRET_BYTES),
        )
    ).session
    client.register_shard(
        pb.RegisterShardRequest(
            shard=0, incarnation=8, address="h:1", host="h", pid=2, software=SOFTWARE
        )
    )
    beats = (
        pb.HeartbeatWorkerRequest(session=session),
        pb.HeartbeatShardRequest(shard=0, incarnation=8),
    )
    client.heartbeat_worker(beats[0], LONG_S)
    client.heartbeat_shard(beats[1])
    return beats


def test_health_and_signs_of_life_while_the_job_is_held_up(
    served: Served, client: CoordinatorClient, clock: ManualClock
) -> None:
    of_worker, of_shard = _join(client)
    # Shorter than what a coordinator forgives everybody that was itself away.
    for _ in range(3):
        served.do(served.job_run.tick)
        clock.advance(0.4 * LEASE_S)
    with held_up(served):
        assert why_unhealthy(served.address, SERVICE, LONG_S) == ""
        assert not client.heartbeat_worker(of_worker, LONG_S).unknown
        assert not client.heartbeat_shard(of_shard).unknown
    served.do(served.job_run.tick)
    assert served.job_run.members.workers[WORKER].state == "active"
    assert served.job_run.members.places.shards[0].state == "starting"


def test_the_content_of_a_heartbeat_is_recorded_afterwards(
    served: Served, client: CoordinatorClient
) -> None:
    beat, _ = _join(client)
    beat.waiting_for = "the disk"
    with held_up(served):
        client.heartbeat_worker(beat, LONG_S)
        assert served.job_run.members.workers[WORKER].waiting_for == ""
    served.do(lambda: None)
    assert served.job_run.members.workers[WORKER].waiting_for == "the disk"


def test_an_unknown_worker_waits_for_the_jobs_own_answer(
    served: Served, client: CoordinatorClient
) -> None:
    stranger = pb.HeartbeatWorkerRequest(session=b"another's")
    assert client.heartbeat_worker(stranger, LONG_S).unknown
    with held_up(served), pytest.raises(DeadlinePassed):
        client.heartbeat_worker(stranger, 0.1)


def test_a_worker_that_is_no_longer_known_waits_for_it_too(
    served: Served, client: CoordinatorClient
) -> None:
    beat, _ = _join(client)
    client.leave_worker(pb.LeaveWorkerRequest(session=beat.session))
    assert client.heartbeat_worker(beat, LONG_S).unknown
    with held_up(served), pytest.raises(DeadlinePassed):
        client.heartbeat_worker(beat, 0.1)


def test_a_coordinator_whose_job_is_dead_does_not_pass_for_alive(
    served: Served, client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat, _ = _join(client)
    with held_up(served):
        monkeypatch.setattr(crossing, "STANDSTILL_S", -1.0)
        assert why_unhealthy(served.address, SERVICE, LONG_S).endswith("is NOT_SERVING")
        with pytest.raises(DeadlinePassed):
            client.heartbeat_worker(beat, 0.1)


class Watched:
    """Streams that say when they are closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return self.Watch

    async def Watch(self, request: int, _context: Any) -> AsyncGenerator[int, None]:  # noqa: N802
        try:
            for number in range(request):
                yield number + 1
            await asyncio.sleep(LONG_S)
        finally:
            self.closed.set()


@pytest.mark.parametrize("read", [0, 2, 3])
def test_a_stream_ends_in_the_jobs_loop_when_its_reader_is_gone(read: int) -> None:
    """Before its first answer, between two, and while it has nothing to say."""
    servicer, network = Watched(), LoopThread("network")
    network.start()

    async def watch(crossed: Any) -> list[int]:
        answers = crossed.Watch(3, CONTEXT)
        found = [await anext(answers) for _ in range(read)]
        if read == 3:
            waiting = asyncio.ensure_future(anext(answers))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait((waiting,))
        await answers.aclose()
        return found

    async def main() -> None:
        job = asyncio.get_running_loop()
        untyped: Any = servicer
        crossing = Crossing(job, Pulse(), NotReady)
        crossing.open(untyped)
        found = await network.run(watch(crossing))
        assert found == list(range(1, read + 1))
        if read:
            assert await asyncio.to_thread(servicer.closed.wait, LONG_S)

    asyncio.run(main())
    network.stop()


class Answering:
    """Answers at once, later, or not at all."""

    def __init__(self) -> None:
        self.began, self.cancelled = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return self.GetJob

    def GetJob(self, request: str, _context: Any) -> Any:  # noqa: N802
        if request == "refused":
            raise NotReady("not yet")
        return "at once" if request == "plain" else self._later(request)

    async def _later(self, request: str) -> str:
        if request == "refused later":
            await asyncio.sleep(0)
            raise NotReady("not yet, either")
        if request == "never":
            self.began.set()
            try:
                await asyncio.sleep(LONG_S)
            finally:
                self.cancelled.set()
        return "later"


def _ask(request: str, cancel: bool = False) -> tuple[Answering, Any]:
    """Calls across two loops; with ``cancel`` once the call has begun to wait."""
    servicer, network = Answering(), LoopThread("network")
    network.start()

    async def ask(crossed: Any) -> Any:
        call = asyncio.ensure_future(crossed.GetJob(request, CONTEXT))
        if cancel:
            await asyncio.to_thread(servicer.began.wait, LONG_S)
            call.cancel()
        return await call

    async def main() -> Any:
        untyped: Any = servicer
        crossing = Crossing(asyncio.get_running_loop(), Pulse(), NotReady)
        crossing.open(untyped)
        try:
            return await network.run(ask(crossing))
        except (NotReady, asyncio.CancelledError) as error:
            await asyncio.sleep(0)
            return error

    try:
        return servicer, asyncio.run(main())
    finally:
        network.stop()


@pytest.mark.parametrize(("request_", "answer"), [("plain", "at once"), ("soon", "later")])
def test_an_answer_crosses_at_once_or_after_a_wait(request_: str, answer: str) -> None:
    assert _ask(request_)[1] == answer


@pytest.mark.parametrize(
    ("request_", "why"), [("refused", "not yet"), ("refused later", "not yet, either")]
)
def test_an_error_crosses_at_once_or_after_a_wait(request_: str, why: str) -> None:
    error = _ask(request_)[1]
    assert isinstance(error, NotReady)
    assert str(error) == why


def test_a_cancelled_call_ends_in_the_jobs_loop() -> None:
    servicer, error = _ask("never", cancel=True)
    assert isinstance(error, asyncio.CancelledError)
    assert servicer.cancelled.wait(LONG_S)
