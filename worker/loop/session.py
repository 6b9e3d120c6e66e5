"""A worker's standing with the coordinator: calls, heartbeats, and what has to interrupt it."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from coordinator.client.client import HEARTBEAT_CALL_S, CoordinatorClient
from psrpc.core.errors import Forming, NotReady, PsError, ShardUnreachable
from psrpc.core.exit_status import DRAINED
from psrpc.ops.logs import get_logger, set_role
from psrpc.ops.retry import waiting_words
from psrpc.ops.threads import THREADS, Threads
from psrpc.security.signatures import SECRET_BYTES
from psrpc.v1 import coordinator_pb2 as pb
from worker.loop.routes import Routes
from worker.protocol.actions import WorkDone
from worker.protocol.done import DoneBatch
from worker.protocol.membership import Membership
from worker.runtime.waits import Waits

log = get_logger()

Response = TypeVar("Response")

TICK_S = 0.5
"""How often the heartbeat thread looks whether a wait has become long."""

PAUSE_S = 0.2
"""Least time between two tries of a call that the other side answered at once without news."""

HURRY_S = 0.2
"""Between two heartbeats while a shard does not answer: their answers tell of its replacement."""

FAREWELL_S = 1.5
"""Deadline of each call that a worker makes when it leaves."""

Interrupt = Callable[[bool], None]
"""Called from any thread when :meth:`Standing.check` begins to raise; with True if nothing that is
under way can matter any more, with False if the step may still be finished."""


class Standing:
    """One worker and its coordinator. Thread-safe.

    The trainer's thread makes the calls, one more may ask for the next lease ahead of time, and
    three threads of this class send heartbeats, announce waits and probe routes. One lock guards
    the membership, and that ``_interrupted`` is set exactly while :meth:`check` raises; no call is
    made under it.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        incarnation: int,
        connect_timeout_s: float,
        times: Callable[[], pb.WorkerTimes] = pb.WorkerTimes,
        threads: Threads = THREADS,
        routes: Routes | None = None,
    ) -> None:
        """``times`` says where this worker's time has gone; any thread may call it. ``threads`` are
        the worker's, and ``routes`` those that it finds out about."""
        self.waits = Waits(lambda reason, waited_s: log.info(_waiting_line(reason, waited_s)))
        self.connect_timeout_s = connect_timeout_s
        self.security = client.security
        self.threads = threads
        self.membership = Membership(incarnation, secrets.token_bytes(SECRET_BYTES))
        self.routes = routes or Routes()
        self.position: Callable[[], pb.WorkerPosition | None] = lambda: None
        """How far the trainer's thread has come; any thread may call it."""
        self.transports: Callable[[], list[pb.Transport]] = list
        """How tensors travel to the shards; any thread may call it."""
        self._client = client
        self._times = times
        self._lock = threading.Lock()
        self._interrupted = threads.event()
        self._interrupts: set[Interrupt] = set()
        self._hurried = False
        self._wake = threads.event()
        self._closing = threads.event()
        # Threads of their own: a heartbeat that hangs must not silence the announcements, nor must
        # a probe.
        self._threads = [
            threads.thread(self._beat, "heartbeat"),
            threads.thread(self._announce, "announce"),
        ]
        self._prober = threads.thread(self._probe, "probe")

    def __enter__(self) -> Standing:
        for thread in (*self._threads, self._prober):
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
        # It may be blocked for seconds, by a route that does not matter any more.
        self._prober.join(TICK_S)

    @property
    def worker(self) -> str:
        """This worker's name; empty before it has registered."""
        return self.membership.worker

    @property
    def session(self) -> bytes:
        """What shards know this worker by; empty before it has registered."""
        return self.membership.session

    # -- interrupts ---------------------------------------------------------------------------

    def stop(self, status: int = DRAINED) -> None:
        """Asks the trainer to leave after its present step; see :meth:`Membership.stop`."""
        self._tell(lambda: self.membership.stop(status))

    def interrupt_with(self, interrupt: Interrupt) -> None:
        """``interrupt`` is called, too, whenever :meth:`check` begins to raise."""
        with self._lock:
            self._interrupts.add(interrupt)

    def interrupt_with_no_longer(self, interrupt: Interrupt) -> None:
        """Undoes :meth:`interrupt_with`; a call may still be under way."""
        with self._lock:
            self._interrupts.discard(interrupt)

    def check(self, *, finishing: bool = False) -> None:
        """Raises what ends the present work; cheap, for every step and every turn of a wait.

        Args:
            finishing: the step under way comes to its end; a signal lets it.

        Raises:
            Stopped: a signal said so, or the job is over.
            JobFailed: the job has failed.
            StaleGeneration: the worker has to join anew.
        """
        # The flag is never down while there is a reason to raise.
        if self._interrupted.is_set():
            with self._lock:
                if not finishing or self.membership.outdated:
                    self.membership.check()

    @property
    def interrupted(self) -> bool:
        """Whether nothing is to be repeated or awaited any more."""
        return self._interrupted.is_set()

    def pause(self, seconds: float = PAUSE_S) -> None:
        """Sleeps, but not through a signal; raises as :meth:`check` does."""
        self._interrupted.wait(seconds)
        self.check()

    def hurry(self, hurried: bool) -> None:
        """Whether a shard that does not answer is awaited: whether heartbeats go faster."""
        if hurried != self._hurried:
            self._hurried = hurried
            if hurried:
                self._wake.set()

    # -- joining ------------------------------------------------------------------------------

    def why_away(self) -> PsError | None:
        """Asks the coordinator once, without waiting for it; why it does not answer, if it may yet.

        Raises:
            PsError: no waiting can mend it; see :meth:`CoordinatorClient.persist`.
        """
        away = self._client.raise_if_hopeless()
        if away is None:
            try:
                self._client.get_job()
            except PsError as error:
                if not error.retryable:
                    raise
                return error
        return away

    def get_job(self) -> pb.GetJobResponse:
        """What to load. Waits for the coordinator."""
        job = self.persist(self._client.get_job)
        with self._lock:
            self.membership.settings_sha256 = job.settings_sha256
        return job

    def register(self, job_sha256: str, device: str) -> None:
        """Becomes a worker of the job, or becomes one again, maybe under another name.

        Raises:
            JobMismatch: another job file, other settings or another version of this software.
        """
        request = self.membership.register(socket.gethostname(), os.getpid(), job_sha256, device)
        response = self.persist(lambda: self._client.register_worker(request))
        known_as = self.worker
        with self._lock:
            self.membership.registered(response)
        self.flush()
        if self.worker != known_as:
            set_role(self.worker)
            log.info("joined the job", device=device)

    def begin_again(self) -> None:
        """What this worker held is lost; :meth:`register` comes next."""
        with self._lock:
            self.membership.rejoins()
            if not self.membership.interrupted:
                self._interrupted.clear()
        self.pause()

    def get_cluster(self) -> pb.GetClusterResponse:
        """Where the shards are; waits until all are ready. What was held before is dropped.

        That a generation is formed may take any time: a large checkpoint is read for minutes. Only
        the time counts in which shards are away.

        Raises:
            ShardUnreachable: shards have been away for too long.
        """
        request = self.membership.get_cluster()
        away_since: float | None = None
        with self.waits.on("the shards"):
            while True:
                try:
                    cluster = self.persist(lambda: self._client.get_cluster(request))
                    break
                except NotReady as error:
                    now = self.threads.now()
                    if isinstance(error, Forming):
                        away_since = None
                    elif away_since is None:
                        away_since = now
                    elif now - away_since >= self.connect_timeout_s:
                        raise ShardUnreachable(
                            f"shards have been away for {now - away_since:.0f} s: {error}; "
                            "start what is missing, or allow more with --connect-timeout S"
                        ) from None
                    self.waits.on(str(error))
                    self.pause()
        self._tell(lambda: self.membership.joined(cluster))
        return cluster

    # -- work ---------------------------------------------------------------------------------

    def done(self, batch: DoneBatch) -> None:
        """Reports a batch with the next heartbeat or lease."""
        with self._lock:
            self.membership.done(batch)

    def flush(self) -> None:
        """Sends what is to be reported now rather than with the next heartbeat; does not wait."""
        self._wake.set()

    def lease(self) -> pb.Lease:
        """Asks for work; the answer may be to wait."""
        with self._lock:
            asked = self.membership.lease()
        lease = self.persist(lambda: self._client.lease_work(asked.request)).lease
        with self._lock:
            self.membership.leased(asked, lease)
        return lease

    def commit(self, round_number: int, done: DoneBatch) -> pb.Lease:
        """Sync: all shards hold this attempt. Brings the next lease; the answer may be to wait.

        Raises:
            OutcomeUnknown: the coordinator did not answer; whether the attempt counts is not known.
        """
        request = self.membership.commit(round_number, done)
        what = f"the commit of {done.batch} in round {round_number}"
        return self.persist(
            lambda: self._client.commit_batch(request), effect=what, finishing=True
        ).lease

    def report(self, done: WorkDone) -> None:
        """Reports work other than batches."""
        request = self.membership.report(done)
        self.persist(lambda: self._client.report_work(request))

    def leave(self, reason: str, *, fatal: bool = False) -> None:
        """Gives all leases back, best effort, within ``2 * FAREWELL_S``: a coordinator that is gone
        needs no farewell."""
        if not self.worker:
            return
        try:
            self._heartbeat(FAREWELL_S)
            self._client.leave_worker(self.membership.leave(reason, fatal), FAREWELL_S)
        except PsError as error:
            log.info("could not say goodbye to the coordinator", reason=str(error))

    def persist(
        self, call: Callable[[], Response], *, effect: str = "", finishing: bool = False
    ) -> Response:
        """``call``, repeated while the coordinator cannot be reached; see
        :meth:`CoordinatorClient.persist` and :meth:`check`."""
        self.check(finishing=finishing)
        try:
            return self._client.persist(
                call, self.connect_timeout_s, log.info, self._interrupted, effect
            )
        except PsError:
            # A wait that a signal cut short ends as that, whatever the call made of it.
            self.check()
            raise

    # -- the threads --------------------------------------------------------------------------

    def _beat(self) -> None:
        answered = True
        while not self._closing.is_set():
            self._wake.clear()
            try:
                self._heartbeat(HEARTBEAT_CALL_S)
                if not answered:
                    log.info("the coordinator answers heartbeats again")
                answered = True
            except PsError as error:
                # The trainer's own calls decide when a missing coordinator is the end; a long step
                # makes none.
                if answered:
                    log.info("the coordinator does not answer heartbeats", reason=str(error))
                answered = False
            every_s = self.membership.heartbeat_s
            self._wake.wait(min(every_s, HURRY_S) if self._hurried else every_s)

    def _announce(self) -> None:
        while not self._closing.wait(TICK_S):
            self.waits.tick(self.threads.now())

    def _probe(self) -> None:
        while not self._closing.wait(TICK_S):
            if self.routes.probe():
                self.flush()

    def _heartbeat(self, deadline_s: float) -> None:
        unreachable, position = self.routes.unreachable(), self.position()
        with self._lock:
            beat = self.membership.beat(self.waits.reason(), self._times(), unreachable, position)
        if beat is None:
            return
        beat.request.transports.extend(self.transports())
        response = self._client.heartbeat_worker(beat.request, deadline_s)
        self._tell(lambda: self.membership.heard(beat, response))

    def _tell(self, change: Callable[[], None]) -> None:
        """Changes the membership, and interrupts the trainer's thread if it has to stop now."""
        with self._lock:
            change()
            if not self.membership.interrupted:
                return
            self._interrupted.set()
            at_once = self.membership.outdated
            interrupts = tuple(self._interrupts)
        for interrupt in interrupts:
            interrupt(at_once)


def _waiting_line(reason: str, waited_s: float) -> str:
    return f"{waiting_words(reason)} ({waited_s:.0f} s)"
