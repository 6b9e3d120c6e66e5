"""A coordinator that only says what a test tells it to, on a real port."""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from psrpc.core.errors import AlreadyExists, PsError, StaleGeneration, Unreachable
from psrpc.core.plan import Plan
from psrpc.core.policy import Policy
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1.coordinator_pb2_grpc import CoordinatorServicer
from tests.coordinator.fakes import listening
from tests.pserver.shards import AUTHORITY, SGD

TOKEN = "token-of-the-run"
WAIT_S = 30.0


def begin_at(generation: int, **more: Any) -> pb.Begin:
    """An order to begin, with the keys of :data:`tests.pserver.shards.AUTHORITY`."""
    keys = AUTHORITY.keys
    return pb.Begin(
        generation=generation, policy=1, verify_key=keys.verify, grant_key=keys.grant, **more
    )


class Commands:
    """Messages for command streams: None ends the stream, and so does an error."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[pb.WatchResponse | PsError | None] = deque()

    def put(self, command: pb.WatchResponse | PsError | None) -> None:
        with self._changed:
            self._waiting.append(command)
            self._changed.notify_all()

    def get(self, context: Any) -> pb.WatchResponse | PsError | None:
        """The next one; None as well if the stream of ``context`` has ended, which takes nothing
        away from the one that follows it. A shutdown stays for later streams: the stream
        that it was handed to may not have brought it."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not context.is_active())
            if not context.is_active():
                return None
            first = self._waiting[0]
            if isinstance(first, pb.WatchResponse) and first.HasField("shutdown"):
                return first
            return self._waiting.popleft()

    def wake(self) -> None:
        """A stream has ended."""
        with self._changed:
            self._changed.notify_all()


class FakeCoordinator(CoordinatorServicer):
    """Answers shards. Tests read what came from its queues, which wait on events, not on time."""

    def __init__(self, run_dir: Path, plan: Plan):
        (run_dir / "token").write_text(TOKEN)
        self.settings = json.dumps(Policy().to_json()).encode()
        self.registration = pb.RegisterShardResponse(
            run_id="run-1",
            plan=plan.to_json(),
            optimizer=json.dumps(SGD).encode(),
            engine="numpy",
            run_dir=str(run_dir),
            token=TOKEN,
            heartbeat_s=0.02,
            wire_dtype="float32",
        )
        self.begin = begin_at(1, fresh=True, settings=self.settings)
        """Where a shard is told to begin that watches and has not reported that it did."""
        self.begun: dict[int, int] = {}
        """The newest generation that an incarnation has reported to have begun."""
        self.taken = False
        self.silent = False
        self.failures: deque[PsError] = deque()
        """What the next calls raise, other than that which opens a command stream."""
        self.saved = False
        self.saving = False
        """Whether a checkpoint was committed since a shard has said that it leaves."""
        self.awaited = ""
        """What a generation waits for that is formed."""
        self.known: set[int] = set()
        """Incarnations that have registered; clear it as a restart would."""
        self.replaced = False
        """Whether another process has the place."""
        self.address = ""
        self.registered: queue.Queue[pb.RegisterShardRequest] = queue.Queue()
        self.refused: queue.Queue[pb.RegisterShardRequest] = queue.Queue()
        self.ready: queue.Queue[pb.ReportShardReadyRequest] = queue.Queue()
        self.snapshots: queue.Queue[pb.ReportSnapshotRequest] = queue.Queue()
        self.heartbeats: queue.Queue[pb.HeartbeatShardRequest] = queue.Queue()
        self.commands = Commands()
        self.watches: queue.Queue[pb.WatchRequest] = queue.Queue()

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.popleft()

    def RegisterShard(self, request: pb.RegisterShardRequest, context: Any) -> Any:  # noqa: N802
        self._fail()
        if self.taken:
            self.refused.put(request)
            raise AlreadyExists(f"shard {request.shard} is held by another process")
        self.known.add(request.incarnation)
        self.registered.put(request)
        return self.registration

    def ReportShardReady(  # noqa: N802
        self, request: pb.ReportShardReadyRequest, context: Any
    ) -> Any:
        self._fail()
        if not request.error:
            self.begun[request.incarnation] = request.generation
        self.ready.put(request)
        return pb.ReportShardReadyResponse()

    def HeartbeatShard(self, request: pb.HeartbeatShardRequest, context: Any) -> Any:  # noqa: N802
        self._fail()
        if self.silent:
            raise Unreachable("as if it were away")
        if self.replaced:
            raise StaleGeneration(f"shard {request.shard} is held by another process")
        self.heartbeats.put(request)
        return pb.HeartbeatShardResponse(
            unknown=request.incarnation not in self.known,
            saved=request.leaving and self.saved,
            saving=request.leaving and self.saving,
            waiting_for=self.awaited,
        )

    def ReportSnapshot(self, request: pb.ReportSnapshotRequest, context: Any) -> Any:  # noqa: N802
        self.snapshots.put(request)
        return pb.ReportSnapshotResponse()

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[Any]:  # noqa: N802
        self.watches.put(request)
        if request.incarnation not in self.known:
            raise StaleGeneration(f"shard {request.shard} has not registered here")
        context.add_callback(self.commands.wake)
        if self.begun.get(request.incarnation, 0) < self.begin.generation:
            yield pb.WatchResponse(begin=self.begin)
        while (command := self.commands.get(context)) is not None:
            if isinstance(command, PsError):
                raise command
            yield command
            if command.HasField("shutdown"):
                return


@contextmanager
def running(
    fake: FakeCoordinator, address: str = "127.0.0.1:0", security: Security = PLAINTEXT
) -> Iterator[FakeCoordinator]:
    """``fake`` behind a real server."""
    with listening(fake, address, security) as fake.address:
        yield fake
