"""A worker's standing with the coordinator: who it is, what it reports, when it has to stop."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from coordinator.client import CoordinatorClient
from psrpc.errors import JobFailed, NotReady, PsError, StaleGeneration
from psrpc.logs import get_logger, set_role
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.version import SOFTWARE
from worker.done import DoneBatch, DoneBatches
from worker.waits import Waits

log = get_logger()

Response = TypeVar("Response")

TICK_S = 0.5
"""How often the heartbeat thread looks whether a wait has become long."""

PAUSE_S = 0.2
"""Least time between two tries of a call that the other side answered at once without news."""


class Stopped(Exception):
    """This worker was told to leave (a signal, or the job has ended), which its text says; not an
    error."""


class Standing:
    """One worker and its coordinator.

    The trainer's thread makes the calls, one more may ask for the next lease ahead of time, and
    two threads of this class send heartbeats and announce waits. What two threads touch is
    guarded by ``DoneBatches``, or is a single assignment.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        incarnation: int,
        connect_timeout_s: float,
    ) -> None:
        self.waits = Waits(lambda reason, waited_s: log.info(_waiting_line(reason, waited_s)))
        self.connect_timeout_s = connect_timeout_s
        self.worker = ""
        self.generation = 0
        self.policy = 0
        self._client = client
        self._incarnation = incarnation
        self._stopping = False
        self._interrupted = threading.Event()
        self._interrupts: set[threading.Event] = {self._interrupted}
        self._done = DoneBatches()
        self._dropped = False
        self._unknown = False
        self._shutdown: pb.Shutdown | None = None
        self._heartbeat_s = 1.0
        self._wake = threading.Event()
        self._closing = threading.Event()
        # Two threads: a heartbeat that hangs must not silence the announcements.
        self._threads = [
            threading.Thread(target=self._beat, name="heartbeat", daemon=True),
            threading.Thread(target=self._announce, name="announce", daemon=True),
        ]

    def __enter__(self) -> Standing:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._wake.set()
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Asks the trainer to leave after its present step; a signal handler may call it."""
        self._stopping = True
        self._interrupt()

    def interrupt_with(self, event: threading.Event) -> None:
        """``event`` is set, too, whenever :meth:`check` begins to raise."""
        self._interrupts.add(event)

    def interrupt_with_no_longer(self, event: threading.Event) -> None:
        """Undoes :meth:`interrupt_with`."""
        self._interrupts.discard(event)

    def check(self) -> None:
        """Raises what ends the present work; cheap, for every step and every turn of a wait.

        Raises:
            Stopped: a signal said so, or the job is over.
            JobFailed: the job has failed.
            StaleGeneration: the coordinator took this worker for gone; it has to join again.
        """
        if self._stopping:
            raise Stopped("told to stop")
        if self._shutdown is not None:
            raise_shutdown(self._shutdown)
        if self._unknown:
            raise StaleGeneration("the coordinator has taken this worker for gone")

    def pause(self, seconds: float = PAUSE_S) -> None:
        """Sleeps, but not through a signal; raises as :meth:`check` does."""
        self._interrupted.wait(seconds)
        self.check()

    def get_job(self) -> pb.GetJobResponse:
        """What to load. Waits for the coordinator."""
        return self.persist(self._client.get_job)

    def register(self, job_sha256: str, device: str) -> None:
        """Becomes a worker of the job, or becomes one again.

        Raises:
            JobMismatch: another job file or another version of this software.
        """
        request = pb.RegisterWorkerRequest(
            incarnation=self._incarnation,
            host=socket.gethostname(),
            pid=os.getpid(),
            job_sha256=job_sha256,
            software=SOFTWARE,
            device=device,
        )
        response = self.persist(lambda: self._client.register_worker(request))
        self._heartbeat_s = response.heartbeat_s or self._heartbeat_s
        self.flush()
        if response.worker != self.worker:
            self.worker = response.worker
            set_role(self.worker)
            log.info("joined the job", device=device)

    def begin_again(self) -> None:
        """What this worker held is lost; :meth:`register` comes next."""
        self._unknown = False
        self._interrupted.clear()
        # After the clearing, so that a stop that comes in between is seen.
        self.check()
        self.pause()

    def get_cluster(self) -> pb.GetClusterResponse:
        """Where the shards are; waits until all are ready. What was held before is dropped."""
        request = pb.GetClusterRequest(worker=self.worker, incarnation=self._incarnation)
        with self.waits.on("the shards"):
            while True:
                try:
                    cluster = self.persist(lambda: self._client.get_cluster(request))
                    break
                except NotReady as error:
                    self.waits.on(str(error))
                    self.pause()
        if (cluster.generation, cluster.policy) != (self.generation, self.policy):
            self._done.clear()
        self.generation, self.policy = cluster.generation, cluster.policy
        self._dropped = True
        return cluster

    def done(self, batch: DoneBatch) -> None:
        """Reports a batch with the next heartbeat or lease."""
        self._done.add(batch)

    def flush(self) -> None:
        """Sends what is to be reported now rather than with the next heartbeat; does not wait."""
        self._wake.set()

    def lease(self) -> pb.Lease:
        """Asks for work; the answer may be to wait."""
        sent = self._done.pending()
        request = pb.LeaseWorkRequest(
            worker=self.worker,
            incarnation=self._incarnation,
            generation=self.generation,
            policy=self.policy,
            done=[done.message() for done in sent],
            # After leases were dropped the coordinator has to give them again.
            received=0 if self._dropped else None,
        )
        lease = self.persist(lambda: self._client.lease_work(request)).lease
        # An evaluation comes before what is given again, so that is still to be asked for.
        self._dropped = self._dropped and lease.WhichOneof("work") in ("evaluate", "merge")
        self._done.acknowledge(sent)
        return lease

    def commit(self, round_number: int, done: DoneBatch) -> pb.Lease:
        """Sync: all shards hold this attempt. Brings the next lease; the answer may be to wait."""
        request = pb.CommitBatchRequest(
            worker=self.worker,
            incarnation=self._incarnation,
            generation=self.generation,
            policy=self.policy,
            round=round_number,
            report=done.message(),
        )
        return self.persist(lambda: self._client.commit_batch(request)).lease

    def report(
        self,
        *,
        initialized: pb.InitializeDone | None = None,
        evaluated: pb.EvaluateDone | None = None,
        merged: pb.MergeDone | None = None,
    ) -> None:
        """Reports work other than batches; exactly one argument is given."""
        request = pb.ReportWorkRequest(
            worker=self.worker,
            incarnation=self._incarnation,
            generation=self.generation,
            initialized=initialized,
            evaluated=evaluated,
            merged=merged,
        )
        self.persist(lambda: self._client.report_work(request))

    def leave(self, reason: str, *, fatal: bool = False) -> None:
        """Gives all leases back, best effort: a coordinator that is gone needs no farewell."""
        if not self.worker:
            return
        try:
            self._heartbeat()
            self._client.leave_worker(
                pb.LeaveWorkerRequest(
                    worker=self.worker, incarnation=self._incarnation, reason=reason, fatal=fatal
                )
            )
        except PsError as error:
            log.info("could not say goodbye to the coordinator", reason=str(error))

    def persist(self, call: Callable[[], Response]) -> Response:
        """``call``, repeated while the coordinator cannot be reached."""
        self.check()
        try:
            return self._client.persist(
                call, self.connect_timeout_s, lambda line: log.info(line), self._interrupted
            )
        except PsError:
            # A wait that a signal cut short ends as that, whatever the call made of it.
            self.check()
            raise

    def _beat(self) -> None:
        while not self._closing.is_set():
            self._wake.clear()
            if self.worker:
                try:
                    self._heartbeat()
                except PsError as error:
                    # The trainer's own calls decide when a missing coordinator is the end.
                    log.debug("heartbeat failed", reason=str(error))
            self._wake.wait(self._heartbeat_s)

    def _announce(self) -> None:
        while not self._closing.wait(TICK_S):
            self.waits.tick(time.monotonic())

    def _heartbeat(self) -> None:
        sent = self._done.pending()
        request = pb.HeartbeatWorkerRequest(
            worker=self.worker,
            incarnation=self._incarnation,
            generation=self.generation,
            policy=self.policy,
            done=[done.message() for done in sent],
            waiting_for=self.waits.reason(),
        )
        response = self._client.heartbeat_worker(request)
        if not response.unknown:
            # Otherwise nothing was recorded; the reports go with the first lease after joining.
            self._done.acknowledge(sent)
        if response.HasField("shutdown"):
            self._shutdown = response.shutdown
        elif response.unknown:
            self._unknown = True
        if self._shutdown is not None or self._unknown:
            self._interrupt()

    def _interrupt(self) -> None:
        for event in tuple(self._interrupts):
            event.set()


def raise_shutdown(shutdown: pb.Shutdown) -> None:
    """Ends this worker as the job has ended.

    Raises:
        JobFailed: with the job's reason.
        Stopped: the job is done.
    """
    if shutdown.failed:
        raise JobFailed(shutdown.reason)
    raise Stopped("the job is done")


def _waiting_line(reason: str, waited_s: float) -> str:
    return f"waiting for {reason} ({waited_s:.0f} s)"
