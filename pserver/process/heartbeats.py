"""The heartbeats of a shard to its coordinator."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.client.client import CoordinatorClient
from pserver.engine.engine import ShardEngine
from pserver.process.ending import Ending
from pserver.wire import messages as wire
from psrpc.core.errors import (
    CoordinatorUnreachable,
    DeadlinePassed,
    JobFailed,
    NotReady,
    PsError,
    RemoteFailure,
    StaleGeneration,
)
from psrpc.ops.logs import get_logger
from psrpc.ops.process import resident_nbytes
from psrpc.ops.retry import Announcer
from psrpc.ops.threads import THREADS, Threads
from psrpc.v1 import coordinator_pb2 as pb

log = get_logger()

LEAVING_S = 0.2
"""Interval of heartbeats while the shard waits for its state to be saved."""

ROUND_ANNOUNCE_S = 10.0
"""Interval of log lines about an open round, which is a shard's ordinary state."""


class Heartbeats:
    """A thread that sends heartbeats from ``start`` to ``stop``. Other methods are thread-safe."""

    def __init__(
        self,
        client: CoordinatorClient,
        shard: int,
        incarnation: int,
        connect_timeout_s: float,
        ending: Ending,
        unknown: Callable[[], object],
        threads: Threads = THREADS,
    ) -> None:
        """Args:
        connect_timeout_s: how long the shard goes on without the coordinator.
        unknown: called when the coordinator no longer knows this shard.
        """
        self._client = client
        self._shard = shard
        self._incarnation = incarnation
        self._connect_timeout_s = connect_timeout_s
        self._ending = ending
        self._unknown = unknown
        self._now = threads.now
        self.interval_s = 1.0
        self.engine: ShardEngine | None = None
        """The shard's engine, once it is built."""
        self.doing = "its update engine to be built"
        """What the process waits for; empty when only the engine knows."""
        self.failure = ""
        """Why the process cannot go on; the engine has its own."""
        self._awaited = ""
        """What the coordinator waits for before it sends ``begin``."""
        self._leaving = False
        self._stopped = threads.event()
        self._due = threads.event()
        self._started = False
        self._thread = threads.thread(self._run, "heartbeat")
        self._lost = Announcer(_say)
        self._awaiting_values = Announcer(_say)
        self._awaiting_round = Announcer(_say, ROUND_ANNOUNCE_S)

    def start(self) -> None:
        """Sends the first one ``interval_s`` from now."""
        self._started = True
        self._thread.start()

    def stop(self) -> None:
        """Makes the thread end before its next heartbeat."""
        self._stopped.set()
        self._due.set()

    def join(self) -> None:
        """Waits for the thread to end; close the connection before, to end a current call."""
        if self._started:
            self._thread.join()

    def send_now(self) -> None:
        """Sends a heartbeat at once, because the coordinator waits for something in it."""
        self._due.set()

    def leave(self) -> None:
        """Asks the coordinator to save the state; the shard ends then, or at once without state."""
        self._leaving = True
        self._due.set()

    def _run(self) -> None:
        heard = self._now()
        version = -1
        failing = False
        while True:
            self._due.wait(LEAVING_S if self._leaving else self.interval_s)
            self._due.clear()
            if self._stopped.is_set():
                return
            request = self._heartbeat()
            if self._leaving and not self._something_to_save():
                self._ending.end()
                return
            now = self._now()
            self._announce_wait(request, request.version != version, now)
            version = request.version
            try:
                answer = self._client.heartbeat_shard(request)
            except (CoordinatorUnreachable, DeadlinePassed, RemoteFailure) as error:
                # A failing coordinator may recover; the state of this shard is worth the wait.
                if self._stopped.is_set():
                    return
                self._awaited = ""
                now = self._now()
                failed = isinstance(error, RemoteFailure)
                if now - heard > self._connect_timeout_s:
                    refusal = self._client.refusal
                    what = f"has failed ({error})" if failed else "has been silent"
                    self._ending.end(
                        CoordinatorUnreachable(
                            f"the coordinator at {self._client.address} {what} for"
                            f" {now - heard:.0f} s; the shard gives up"
                            + (f". When it answered last: {refusal}" if refusal else "")
                        )
                    )
                    return
                if failed and not failing:
                    log.warning("the coordinator fails; tried again", reason=str(error))
                log.debug("heartbeat failed", reason=str(error))
                failing = failed
                self._lost.waiting(
                    f"the coordinator at {self._client.address}, for"
                    f" {self._connect_timeout_s:.0f} s at most"
                    + (f": {self._client.refusal}" if self._client.refusal else ""),
                    now,
                )
            except StaleGeneration as error:
                self._ending.end(replaced(self._shard, error))
                return
            except NotReady as error:
                # The coordinator answers, but is reading its job or has too many calls.
                heard, failing = self._now(), False
                self._awaited = ""
                self._lost.waiting(f"the coordinator at {self._client.address}: {error}", heard)
            except PsError as error:
                self._ending.end(error)
                return
            else:
                heard, failing = now, False
                self._awaited = answer.waiting_for
                self._lost.over()
                if answer.unknown:
                    self._unknown()
                elif answer.saved and request.leaving:
                    self._ending.end()
                    return
                elif answer.saving:
                    self._ending.stay()
            if request.failure:
                self._ending.end(JobFailed(request.failure))
                return

    def _something_to_save(self) -> bool:
        return self.engine is not None and self.engine.report().initialized

    def _heartbeat(self) -> pb.HeartbeatShardRequest:
        request = pb.HeartbeatShardRequest(
            shard=self._shard,
            incarnation=self._incarnation,
            failure=self.failure,
            waiting_for=self.doing,
            leaving=self._leaving,
            memory_nbytes=resident_nbytes(),
        )
        if self.engine is None:
            return request
        report = self.engine.report()
        request.generation = report.generation
        request.version = report.version
        request.revoked = report.revoked
        request.applied = report.counters.applied
        request.already_applied = report.counters.already_applied
        request.skipped = report.counters.skipped
        request.refused = report.counters.refused
        request.staleness_counts.extend(report.counters.staleness)
        request.workers.extend(wire.to_workers(report.counters))
        request.too_stale = report.counters.too_stale
        request.uncompensated = report.counters.uncompensated
        request.apply_s = report.counters.apply_s
        request.gradient_nbytes = report.counters.gradient_nbytes
        tables = self.engine.table_figures()
        request.table_rows = sum(table.rows for table in tables)
        request.table_nbytes = sum(table.nbytes for table in tables)
        request.epochs.extend(wire.to_totals(self.engine.totals()))
        awaited = self._awaited if report.generation == 0 else ""
        request.waiting_for = self.doing or awaited or report.waiting_for
        request.failure = self.engine.failure or self.failure
        return request

    def _announce_wait(self, request: pb.HeartbeatShardRequest, moved: bool, now: float) -> None:
        if moved or not request.waiting_for or self.engine is None:
            self._awaiting_values.over()
            self._awaiting_round.over()
        elif self.engine.report().initialized:
            self._awaiting_values.over()
            self._awaiting_round.waiting(request.waiting_for, now)
        else:
            self._awaiting_values.waiting(request.waiting_for, now)


def replaced(shard: int, error: PsError) -> StaleGeneration:
    """Returns the error of a shard whose index another process has taken."""
    return StaleGeneration(f"this process was replaced as shard {shard} and leaves: {error}")


def _say(reason: str, waited_s: float) -> None:
    log.info(f"waiting for {reason} ({waited_s:.0f} s)")
