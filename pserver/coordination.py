"""A shard's standing with the coordinator: registration, heartbeats and commands."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from coordinator.client import RETRY_S, CommandStream, CoordinatorClient
from pserver import wire
from pserver.engine import ShardEngine
from psrpc.errors import (
    CoordinatorUnreachable,
    DeadlinePassed,
    JobFailed,
    NotReady,
    PsError,
    ResourceExhausted,
)
from psrpc.logs import get_logger
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.version import SOFTWARE
from psrpc.waiting import Announcer

log = get_logger()

Result = TypeVar("Result")

ROUND_ANNOUNCE_S = 10.0
"""An open round is the ordinary state of a shard; it is worth a line less often."""


class Ending:
    """How this process will end: the first word counts. Thread-safe."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._lock = threading.Lock()
        self.error: PsError | None = None

    def end(self, error: PsError | None = None) -> None:
        """Ends well, or with ``error``."""
        with self._lock:
            if not self.event.is_set():
                self.error = error
                self.event.set()


class Coordination:
    """Two threads, one for heartbeats and one for commands, and the calls of the main thread.

    ``ending`` is ended by whichever of them learns that the shard has to go.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        shard: int,
        incarnation: int,
        connect_timeout_s: float,
        ending: Ending,
    ) -> None:
        self._client = client
        self._shard = shard
        self._incarnation = incarnation
        self._connect_timeout_s = connect_timeout_s
        self._ending = ending
        self._generation = 0
        self._heartbeat_s = 1.0
        self._engine: ShardEngine | None = None
        self._stopping = threading.Event()
        self._commands: CommandStream | None = None
        self._failure = ""
        self._threads: list[threading.Thread] = []
        self._lost = Announcer(self._say)
        self._awaiting_values = Announcer(self._say)
        self._awaiting_round = Announcer(self._say, ROUND_ANNOUNCE_S)

    def __enter__(self) -> Coordination:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopping.set()
        if self._commands is not None:
            self._commands.cancel()
        self._client.close()  # ends calls under way, in both threads
        for thread in self._threads:
            thread.join()

    def register(self, address: Callable[[], str]) -> pb.RegisterShardResponse:
        """Becomes a shard of the job, and sends heartbeats from then on.

        Args:
            address: HOST:PORT for others; asked at each try, since it may not be known at once.

        Raises:
            AlreadyExists: another process has the index.
            InvalidArgument: the job has no such shard.
            CoordinatorUnreachable: it did not come within the time allowed.
        """

        def call() -> pb.RegisterShardResponse:
            return self._client.register_shard(
                pb.RegisterShardRequest(
                    shard=self._shard,
                    incarnation=self._incarnation,
                    address=address(),
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    software=SOFTWARE,
                )
            )

        response = self.persist(call)
        self._generation = response.generation
        self._heartbeat_s = response.heartbeat_s or self._heartbeat_s
        self._start("heartbeat", self._beat)
        return response

    def ready(self, engine: ShardEngine) -> None:
        """The shard can be served: tells so, and follows commands from then on."""
        report = engine.report()
        request = pb.ReportShardReadyRequest(
            shard=self._shard,
            incarnation=self._incarnation,
            generation=self._generation,
            version=report.version,
            initialized=report.initialized,
            applied=wire.to_applied(engine.applied().to_epochs()),
        )
        self.persist(lambda: self._client.report_shard_ready(request))
        self._engine = engine
        self._start("commands", lambda: self._watch(engine))

    def report_snapshot(self, request: pb.ReportSnapshotRequest) -> None:
        """Tells what came of a snapshot."""
        self.persist(lambda: self._client.report_snapshot(request))

    def persist(self, call: Callable[[], Result]) -> Result:
        """``call``, repeated while the coordinator cannot be reached."""
        return self._client.persist(
            call, self._connect_timeout_s, lambda line: log.info(line), self._ending.event
        )

    def _start(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # -- heartbeats --------------------------------------------------------------------------

    def _beat(self) -> None:
        heard = time.monotonic()
        version = -1
        while not self._stopping.wait(self._heartbeat_s):
            request = self._heartbeat()
            now = time.monotonic()
            self._announce_wait(request, request.version != version, now)
            version = request.version
            try:
                self._client.heartbeat_shard(request)
            except (CoordinatorUnreachable, DeadlinePassed) as error:
                if self._stopping.is_set():
                    return
                now = time.monotonic()
                if now - heard > self._connect_timeout_s:
                    self._ending.end(
                        CoordinatorUnreachable(
                            f"the coordinator at {self._client.address} has been silent for"
                            f" {now - heard:.0f} s; the shard gives up"
                        )
                    )
                    return
                log.debug("heartbeat failed", reason=str(error))
                self._lost.waiting(f"the coordinator at {self._client.address}", now)
            except PsError as error:
                self._ending.end(error)
                return
            else:
                heard = now
                self._lost.over()
            if request.failure:
                self._ending.end(JobFailed(request.failure))
                return

    def _heartbeat(self) -> pb.HeartbeatShardRequest:
        request = pb.HeartbeatShardRequest(
            shard=self._shard, incarnation=self._incarnation, generation=self._generation
        )
        if self._engine is None:
            request.waiting_for = "its update engine to be built"
            return request
        report = self._engine.report()
        request.version = report.version
        request.applied = report.counters.applied
        request.already_applied = report.counters.already_applied
        request.skipped = report.counters.skipped
        request.refused = report.counters.refused
        request.staleness_counts.extend(report.counters.staleness)
        request.waiting_for = report.waiting_for
        request.failure = self._engine.failure or self._failure
        return request

    def _announce_wait(self, request: pb.HeartbeatShardRequest, moved: bool, now: float) -> None:
        if moved or not request.waiting_for or self._engine is None:
            self._awaiting_values.over()
            self._awaiting_round.over()
        elif self._engine.report().initialized:
            self._awaiting_values.over()
            self._awaiting_round.waiting(request.waiting_for, now)
        else:
            self._awaiting_values.waiting(request.waiting_for, now)

    def _say(self, reason: str, waited_s: float) -> None:
        log.info(f"waiting for {reason} ({waited_s:.0f} s)")

    # -- commands ----------------------------------------------------------------------------

    def _watch(self, engine: ShardEngine) -> None:
        request = pb.WatchRequest(
            shard=self._shard, incarnation=self._incarnation, generation=self._generation
        )
        while not self._stopping.is_set():
            try:
                self._commands = self._client.watch(request)
                for command in self._commands:
                    self._obey(engine, command)
            except (CoordinatorUnreachable, DeadlinePassed, NotReady, ResourceExhausted) as error:
                # The heartbeats say so, and decide when it has lasted too long.
                log.debug("command stream broke", reason=str(error))
                self._stopping.wait(RETRY_S)
            except PsError as error:
                self._ending.end(error)
                return
            except Exception as error:
                if self._stopping.is_set():
                    # The channel was closed between the test and the call.
                    return
                # Without its commands a shard would keep everybody waiting for ever.
                log.exception("commands can no longer be carried out")
                self._failure = f"{type(error).__name__} in a command: {error}"
                return

    def _obey(self, engine: ShardEngine, command: pb.WatchResponse) -> None:
        try:
            match command.WhichOneof("command"):
                case "decision":
                    engine.decide(wire.from_decision(command.decision))
                case "snapshot":
                    engine.take_snapshot(wire.from_order(command.snapshot))
                case "release_snapshot":
                    engine.release_snapshot(command.release_snapshot)
                case "shutdown":
                    shutdown = command.shutdown
                    self._ending.end(JobFailed(shutdown.reason) if shutdown.failed else None)
                case unknown:
                    log.warning("unknown command of the coordinator", command=unknown)
        except PsError as error:
            log.warning("a command could not be carried out", reason=str(error))
