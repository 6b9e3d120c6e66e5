"""A shard's connection with the coordinator: registration, heartbeats and commands."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from coordinator.client.client import CoordinatorClient
from coordinator.client.command_stream import CommandStream
from coordinator.client.patience import Patience
from pserver.core.requests import RestoredState
from pserver.engine.engine import ShardEngine
from pserver.process.commands import obey
from pserver.process.ending import Ending
from pserver.process.heartbeats import Heartbeats, replaced
from psrpc import SOFTWARE
from psrpc.core.errors import (
    AlreadyExists,
    CoordinatorUnreachable,
    DeadlinePassed,
    JobMismatch,
    NotReady,
    PsError,
    RemoteFailure,
    ResourceExhausted,
    StaleGeneration,
)
from psrpc.core.plan import Plan
from psrpc.core.shard_reports import HeldState, ShardRegistration, SnapshotReport
from psrpc.ops.logs import get_logger
from psrpc.ops.retry import Announcer, RetryPolicy
from psrpc.ops.threads import THREADS, Threads
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.wire.shard_reports import to_registration, to_snapshot_report, to_watch

log = get_logger()

Result = TypeVar("Result")

_SETTLED = ("optimizer", "engine", "wire_dtype")
"""Fields of the registration's answer that must not change while a shard runs, besides run and
plan."""

PLACE_S = 4.0
"""How long to wait for a shard index that another process has, since that process may have just
died."""

RECONNECT = RetryPolicy(first_s=0.1, longest_s=1.0)  # between two command streams


class Coordination:
    """Runs a heartbeat thread and a command thread, and makes the calls of the main thread to the
    coordinator. Each thread calls ``ending.end`` when it learns that the shard has to stop."""

    def __init__(
        self,
        client: CoordinatorClient,
        shard: int,
        incarnation: int,
        connect_timeout_s: float,
        ending: Ending,
        threads: Threads = THREADS,
        worker: int = 0,
    ) -> None:
        self._worker = worker
        self._client = client
        self._shard = shard
        self._incarnation = incarnation
        self._connect_timeout_s = connect_timeout_s
        self._ending = ending
        self._threads = threads
        self._heartbeats = Heartbeats(
            client, shard, incarnation, connect_timeout_s, ending, self._forgotten, threads
        )
        self._registration = pb.RegisterShardRequest()
        self._job = pb.RegisterShardResponse()
        self._unknown = threads.event()
        self._stopping = threads.event()
        self._commands: CommandStream | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Coordination:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        if self._commands is not None:
            self._commands.cancel()
        self._heartbeats.stop()
        self._client.close()  # ends the current calls of both threads
        self._heartbeats.join()
        if self._thread is not None:
            self._thread.join()

    def register(self, address: Callable[[], str]) -> pb.RegisterShardResponse:
        """Registers the shard with the job and starts the heartbeats.

        Args:
            address: returns the HOST:PORT that other processes should use; called at each try,
                since it may not be known at first.

        Raises:
            AlreadyExists: another process has the shard's index.
            InvalidArgument: the job has no such shard.
            CoordinatorUnreachable: the coordinator did not answer within ``connect_timeout_s``.
        """

        def call() -> pb.RegisterShardResponse:
            shard, host = (self._shard, self._incarnation, address()), socket.gethostname()
            registration = ShardRegistration(*shard, host, os.getpid(), SOFTWARE, self._worker)
            self._registration = to_registration(registration)
            return self._client.register_shard(self._registration)

        began = self._threads.now()
        waiting = Announcer(lambda why, waited_s: log.info(f"waiting: {why} ({waited_s:.0f} s)"))
        while True:
            try:
                self._job = self.persist(call)
                break
            except AlreadyExists as error:
                now = self._threads.now()
                if now - began >= PLACE_S or self._ending.event.is_set():
                    raise
                waiting.waiting(str(error), now)
                self._ending.event.wait(PLACE_S / 20)
        self._heartbeats.interval_s = self._job.heartbeat_s or self._heartbeats.interval_s
        self._heartbeats.start()
        return self._job

    def follow(
        self,
        engine: ShardEngine,
        read: Callable[[str], RestoredState],
        begun: Callable[[], object],
    ) -> None:
        """Starts the command thread for ``engine``. Heartbeats report the figures of ``engine``
        from now on.

        ``read`` reads a checkpoint, see :func:`pserver.process.commands.obey`. The thread calls
        ``begun`` when the shard has begun a generation, before it reports that to the coordinator.
        """
        self._heartbeats.engine = engine
        self._heartbeats.doing = ""
        self._thread = self._threads.thread(lambda: self._follow(engine, read, begun), "commands")
        self._thread.start()

    def cannot_serve(self, error: PsError) -> None:
        """Tells the coordinator that this shard can never serve the job, and why. The coordinator
        then ends the job. Returns after one heartbeat, answered or not."""
        self._heartbeats.failure = error.coded
        self._heartbeats.send_now()
        self._ending.wait()

    def leave(self) -> None:
        """Asks the coordinator to save the shard's state; ``ending`` ends when it is saved."""
        log.info("told to stop: waiting for a checkpoint")
        self._heartbeats.leave()

    def report_snapshot(self, report: SnapshotReport) -> None:
        """Reports the result of a snapshot."""
        request = to_snapshot_report(report)
        self.persist(lambda: self._client.report_snapshot(request))

    def persist(self, call: Callable[[], Result]) -> Result:
        """Repeats ``call`` while the coordinator is unreachable."""
        timeout_s, ending = self._connect_timeout_s, self._ending.event
        return Patience(self._client, timeout_s, lambda line: log.info(line), ending).persist(call)

    def _forgotten(self) -> None:
        """Makes the command thread register again, because the coordinator has restarted."""
        self._unknown.set()
        if self._commands is not None:
            self._commands.cancel()

    def _follow(
        self,
        engine: ShardEngine,
        read: Callable[[str], RestoredState],
        begun: Callable[[], object],
    ) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                if self._unknown.is_set():
                    self._unknown.clear()
                    self._register_again()
                for command in self._watch(engine):
                    failures = 0
                    self._obey(engine, command, read, begun)
            except _Over:
                return
            except StaleGeneration as error:
                log.debug("the coordinator does not know this shard", reason=str(error))
                self._unknown.set()
                failures = 0
            except (CoordinatorUnreachable, DeadlinePassed, NotReady, ResourceExhausted) as error:
                # The heartbeat thread logs this and decides when to give up.
                log.debug("command stream broke", reason=str(error))
            except RemoteFailure as error:
                log.warning("the coordinator failed; its commands are awaited", reason=str(error))
            except PsError as error:
                self._ending.end(error)
                return
            except Exception as error:
                if self._stopping.is_set():
                    # The main thread closed the channel between the test and the call.
                    return
                # A shard that carries out no commands would block the whole job, so it fails
                # instead.
                log.exception("commands can no longer be carried out")
                self._heartbeats.failure = f"{type(error).__name__} in a command: {error}"
                return
            failures += 1
            self._stopping.wait(RECONNECT.pause_s(failures, self._threads.chance()))

    def _register_again(self) -> None:
        try:
            job = self._client.register_shard(self._registration)
        except (AlreadyExists, StaleGeneration) as error:
            self._ending.end(replaced(self._shard, error))
            raise _Over from None
        changed = ", ".join(n for n in _SETTLED if getattr(job, n) != getattr(self._job, n))
        if job.run_id != self._job.run_id:
            why = (
                f"run {job.run_id}, and this shard holds run {self._job.run_id}; if it was to go "
                "on with that one, start it with the --run-dir of that one"
            )
        elif Plan.from_json(job.plan).hash != Plan.from_json(self._job.plan).hash:
            why = "another plan"
        elif changed:
            # The run was resumed with other settings, but this shard was built for the old ones.
            why = f"another {changed}"
        else:
            self._heartbeats.interval_s = job.heartbeat_s or self._heartbeats.interval_s
            log.info("registered again", run=job.run_id)
            return
        self._ending.end(
            JobMismatch(f"the coordinator at {self._client.address} has another job now: {why}")
        )
        raise _Over

    def _watch(self, engine: ShardEngine) -> CommandStream:
        generation, version, initialized = engine.commands.stand()
        held = HeldState(self._incarnation, generation, initialized, version)
        self._commands = self._client.watch(to_watch(self._shard, held))
        if self._unknown.is_set() or self._stopping.is_set():
            # The thread that set the event may have looked for the stream just before it existed.
            self._commands.cancel()
        return self._commands

    def _obey(
        self,
        engine: ShardEngine,
        command: pb.WatchResponse,
        read: Callable[[str], RestoredState],
        begun: Callable[[], object],
    ) -> None:
        kind = command.WhichOneof("command")
        if kind == "shutdown":
            self._ending.shut_down(command.shutdown.failed, command.shutdown.reason)
            return
        if command.begin.restore:
            self._heartbeats.doing = f"{command.begin.restore} to be restored"
        try:
            report = self._carry_out(engine, command, read)
        except PsError as error:
            self._ending.end(error)
            raise _Over from None
        self._heartbeats.doing = ""
        if report is not None:
            if not report.error:
                begun()
                log.info(
                    "ready",
                    run=self._job.run_id,
                    policy=str(engine.identity.settings),
                    generation=report.generation,
                    version=report.version,
                    holds=command.begin.restore or command.begin.WhichOneof("source"),
                )
            try:
                self.persist(lambda: self._client.report_shard_ready(report))
            except StaleGeneration as error:
                # A newer generation, or a new coordinator, will send another order.
                log.info("begun for nothing", generation=report.generation, reason=str(error))
        if kind in ("begin", "revocation"):
            self._heartbeats.send_now()

    def _carry_out(
        self, engine: ShardEngine, command: pb.WatchResponse, read: Callable[[str], RestoredState]
    ) -> pb.ReportShardReadyRequest | None:
        return obey(engine, command, read)


class _Over(Exception):
    """Ends the command thread; ``ending`` has the reason."""
