"""The heartbeats of a shard to its coordinator."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.client.client import CoordinatorClient
from pserver.engine.engine import ShardEngine
from pserver.process.ending import Ending
from psrpc.core.errors import (
    CoordinatorUnreachable,
    DeadlinePassed,
    JobFailed,
    NotReady,
    PsError,
    RemoteFailure,
    StaleGeneration,
)
from psrpc.core.shard_reports import ShardFigures, ShardHeartbeat
from psrpc.ops.logs import get_logger
from psrpc.ops.process import resident_nbytes
from psrpc.ops.retry import Announcer
from psrpc.ops.threads import THREADS, Threads
from psrpc.wire.shard_reports import to_heartbeat

log = get_logger()

LEAVING_S = 0.2
"""Interval of heartbeats while the shard waits for its state to be saved."""

ROUND_ANNOUNCE_S = 10.0
"""Interval of log lines about an open round. It is long, because waiting for a round is normal."""


class Heartbeats:
    """Sends heartbeats in a thread, from ``start`` to ``stop``. The other methods are
    thread-safe."""

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
        connect_timeout_s: how long the shard continues while the coordinator does not answer.
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
        """Describes the wait of the process; empty if the engine's description applies instead."""
        self.failure = ""
        """Why the process cannot continue. Failures of the engine are in ``engine.failure``."""
        self._awaited = ""
        """Describes the wait of the coordinator before it sends ``begin``."""
        self._leaving = False
        self._stopped = threads.event()
        self._due = threads.event()
        self._started = False
        self._thread = threads.thread(self._run, "heartbeat")
        self._lost = Announcer(_say)
        self._awaiting_values = Announcer(_say)
        self._awaiting_round = Announcer(_say, ROUND_ANNOUNCE_S)

    def start(self) -> None:
        """Starts the thread; the first heartbeat is sent ``interval_s`` from now."""
        self._started = True
        self._thread.start()

    def stop(self) -> None:
        """Makes the thread end before its next heartbeat."""
        self._stopped.set()
        self._due.set()

    def join(self) -> None:
        """Waits for the thread to end. Close the connection first, to end a call that may be in
        progress."""
        if self._started:
            self._thread.join()

    def send_now(self) -> None:
        """Sends a heartbeat at once, because the coordinator waits for something in it."""
        self._due.set()

    def leave(self) -> None:
        """Asks the coordinator to save the state. The shard ends when it is saved, or at once if it
        has no state."""
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
            beat = self._heartbeat()
            if self._leaving and not self._something_to_save():
                self._ending.end()
                return
            now = self._now()
            self._announce_wait(beat.figures, beat.figures.version != version, now)
            version = beat.figures.version
            try:
                answer = self._client.heartbeat_shard(to_heartbeat(beat))
            except (CoordinatorUnreachable, DeadlinePassed, RemoteFailure) as error:
                # The coordinator may recover. Waiting for that is better than losing the state of
                # this shard.
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
                elif answer.saved and beat.leaving:
                    self._ending.end()
                    return
                elif answer.saving:
                    self._ending.stay()
            if beat.failure:
                self._ending.end(JobFailed(beat.failure))
                return

    def _something_to_save(self) -> bool:
        return self.engine is not None and self.engine.report().initialized

    def _heartbeat(self) -> ShardHeartbeat:
        if self.engine is None:
            figures = ShardFigures(waiting_for=self.doing, memory_nbytes=resident_nbytes())
            return ShardHeartbeat(
                self._shard, self._incarnation, figures, self.failure, leaving=self._leaving
            )
        report, tables = self.engine.report(), self.engine.table_figures()
        counters = report.counters
        awaited = self._awaited if report.generation == 0 else ""
        figures = ShardFigures(
            version=report.version,
            applied=counters.applied,
            already_applied=counters.already_applied,
            skipped=counters.skipped,
            refused=counters.refused,
            waiting_for=self.doing or awaited or report.waiting_for,
            generation=report.generation,
            staleness_counts=tuple(counters.staleness),
            workers={worker: tuple(counts) for worker, counts in counters.workers.items()},
            too_stale=counters.too_stale,
            uncompensated=counters.uncompensated,
            apply_s=counters.apply_s,
            gradient_nbytes=counters.gradient_nbytes,
            memory_nbytes=resident_nbytes(),
            table_rows=sum(table.rows for table in tables),
            table_nbytes=sum(table.nbytes for table in tables),
            epochs=tuple(self.engine.totals()),
        )
        return ShardHeartbeat(
            self._shard,
            self._incarnation,
            figures,
            self.engine.failure or self.failure,
            report.revoked,
            self._leaving,
        )

    def _announce_wait(self, figures: ShardFigures, moved: bool, now: float) -> None:
        if moved or not figures.waiting_for or self.engine is None:
            self._awaiting_values.over()
            self._awaiting_round.over()
        elif self.engine.report().initialized:
            self._awaiting_values.over()
            self._awaiting_round.waiting(figures.waiting_for, now)
        else:
            self._awaiting_values.waiting(figures.waiting_for, now)


def replaced(shard: int, error: PsError) -> StaleGeneration:
    """Returns the error of a shard whose index another process has taken."""
    return StaleGeneration(f"this process was replaced as shard {shard} and leaves: {error}")


def _say(reason: str, waited_s: float) -> None:
    log.info(f"waiting for {reason} ({waited_s:.0f} s)")
