"""A worker's session with the coordinator: calls, heartbeats and interrupts."""

from __future__ import annotations

import math
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from coordinator.client.client import HEARTBEAT_CALL_S, CoordinatorClient
from coordinator.client.patience import Patience
from psrpc.core.errors import NotReady, PsError
from psrpc.ops.exit_status import DRAINED
from psrpc.ops.logs import get_logger, set_role
from psrpc.ops.retry import waiting_words
from psrpc.ops.threads import THREADS, Threads
from psrpc.security.signatures import SECRET_BYTES
from psrpc.v1 import coordinator_pb2 as pb
from worker.loop.routes import RouteProbe
from worker.loop.shards_away import ShardsAway
from worker.protocol.actions import WorkDone
from worker.protocol.done import DoneBatch
from worker.protocol.membership import WorkerMembership
from worker.runtime.waits import WorkerWaits

log = get_logger()

Response = TypeVar("Response")

TICK_S = 0.5
"""Interval, in seconds, at which the heartbeat thread checks for long waits."""

PAUSE_S = 0.2
"""Least seconds before the next try, after a call that was answered at once without news, and after
joining a generation."""

HURRY_S = 0.2
"""Heartbeat interval, in seconds, while a shard is silent: a reply announces its replacement."""

FAREWELL_S = 1.5
"""Deadline, in seconds, of each call that a leaving worker makes."""

Interrupt = Callable[[bool], None]


class WorkerSession:
    """Connects one worker with its coordinator. Thread-safe.

    The trainer's thread makes the calls, one more may lease ahead of time, and three threads send
    heartbeats, announce waits and probe routes. One lock guards the membership and the invariant
    that ``_interrupted`` is set exactly while :meth:`check` raises; no call is made under it.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        incarnation: int,
        connect_timeout_s: float,
        times: Callable[[], pb.WorkerTimes] = pb.WorkerTimes,
        threads: Threads = THREADS,
        routes: RouteProbe | None = None,
    ) -> None:
        """``times`` returns the time spent so far, by cause; any thread may call it."""
        self.waits = WorkerWaits(lambda why, s: log.info(f"{waiting_words(why)} ({s:.0f} s)"))
        self.connect_timeout_s = connect_timeout_s
        self.security = client.security
        self.threads = threads
        self.membership = WorkerMembership(incarnation, secrets.token_bytes(SECRET_BYTES))
        self.routes = routes or RouteProbe()
        self.position: Callable[[], pb.WorkerPosition | None] = lambda: None
        """Returns the progress of the trainer's thread; any thread may call it."""
        self.transports: Callable[[], list[pb.Transport]] = list
        """Returns how tensors travel to the shards; any thread may call it."""
        self.host: Callable[[Sequence[int]], object] = lambda _slices: None
        """Gets the slices that the worker is to host, from any thread."""
        self._client = client
        self._times = times
        self._lock = threading.Lock()
        self._interrupted = threads.event()
        self._interrupts: set[Interrupt] = set()
        self._hurried, self._joined_at = False, -math.inf
        self._wake, self._closing = threads.event(), threads.event()
        # Separate threads: a hanging heartbeat or probe must not silence the announcements.
        named = {"heartbeat": self._beat, "announce": self._announce}
        self._threads = [threads.thread(run, name) for name, run in named.items()]
        self._prober = threads.thread(self._probe, "probe")

    def __enter__(self) -> WorkerSession:
        for thread in (*self._threads, self._prober):
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._closing.set()
        self._wake.set()
        for thread in self._threads:
            thread.join()
        self._prober.join(TICK_S)  # a probe may block for seconds

    def stop(self, status: int = DRAINED) -> None:
        """Asks the trainer to leave; see :meth:`WorkerMembership.stop`."""
        self._tell(lambda: self.membership.stop(status))

    def fail(self, error: PsError) -> None:
        """Makes the trainer end with ``error``, as soon as it can."""
        self._tell(lambda: self.membership.fail(error))

    def interrupt_with(self, interrupt: Interrupt) -> None:
        """Also calls ``interrupt``, from any thread, whenever :meth:`check` begins to raise: with
        True if no result in flight can matter any more, with False if the step may finish."""
        with self._lock:
            self._interrupts.add(interrupt)

    def interrupt_with_no_longer(self, interrupt: Interrupt) -> None:
        """Undoes :meth:`interrupt_with`; a call may still be running."""
        with self._lock:
            self._interrupts.discard(interrupt)

    def check(self, *, finishing: bool = False) -> None:
        """Raises as :meth:`WorkerMembership.check`; with ``finishing``, not for a stop signal, so
        that the current step can finish. Cheap enough for every step."""
        if self._interrupted.is_set():
            with self._lock:
                if not finishing or self.membership.outdated:
                    self.membership.check()

    @property
    def interrupted(self) -> bool:
        """Whether retries and waits must end."""
        return self._interrupted.is_set()

    def pause(self, seconds: float = PAUSE_S) -> None:
        """Sleeps; a signal ends the sleep early. Raises as :meth:`check` does."""
        self._interrupted.wait(seconds)
        self.check()

    def hurry(self, hurried: bool) -> None:
        """Sets whether heartbeats are faster, for a worker that waits for a silent shard."""
        was, self._hurried = self._hurried, hurried
        if hurried and not was:
            self._wake.set()

    def get_job(self) -> pb.GetJobResponse:
        """Returns the job to load."""
        job = self.persist(self._client.get_job)
        with self._lock:
            self.membership.settings_sha256 = job.settings_sha256
        return job

    def register(self, job_sha256: str, device: str) -> None:
        """Registers as a worker of the job, or again, possibly under another name. Raises
        JobMismatch if the job file, the settings or the software version differ."""
        request = self.membership.register(socket.gethostname(), os.getpid(), job_sha256, device)
        response = self.persist(partial(self._client.register_worker, request))
        known_as = self.membership.worker
        with self._lock:
            self.membership.registered(response)
        self.flush()
        if self.membership.worker != known_as:
            set_role(self.membership.worker)
            log.info("joined the job", device=device)

    def begin_again(self) -> None:
        """Gives up the registration and the generation; :meth:`register` comes next."""
        with self._lock:
            self.membership.rejoins()
            if not self.membership.interrupted:
                self._interrupted.clear()
        self.pause(max(0.0, self._joined_at + PAUSE_S - self.threads.now()))

    def get_cluster(self) -> pb.GetClusterResponse:
        """Returns the cluster once all shards are ready; drops leases held before. Raises
        ShardUnreachable if one is away, and not reading a checkpoint, for ``connect_timeout_s``."""
        request = self.membership.get_cluster()
        away = ShardsAway(self.connect_timeout_s)
        with self.waits.on("the shards"):
            while True:
                try:
                    cluster = self.persist(lambda: self._client.get_cluster(request))
                    break
                except NotReady as error:
                    away.answered(error, self.threads.now())
                    self.waits.on(str(error))
                    self.pause()
        self._joined_at = self.threads.now()
        self._tell(lambda: self.membership.joined(cluster))
        return cluster

    def done(self, batch: DoneBatch) -> None:
        """Reports a batch with the next heartbeat or lease."""
        with self._lock:
            self.membership.done(batch)

    def flush(self) -> None:
        """Sends pending reports now instead of with the next heartbeat; does not wait."""
        self._wake.set()

    def lease(self) -> pb.Lease:
        """Leases work; the lease may say to wait."""
        with self._lock:
            asked = self.membership.lease()
        lease = self.persist(partial(self._client.lease_work, asked.request)).lease
        with self._lock:
            self.membership.leased(asked, lease)
        return lease

    def committing(self, round_number: int, done: DoneBatch) -> Callable[[], pb.Lease]:
        """Sync: returns a call, for any thread, that commits an attempt that all shards hold and
        returns the next lease. It raises OutcomeUnknown if the commit may have been recorded."""
        request = self.membership.commit(round_number, done)
        what = f"the commit of {done.batch} in round {round_number}"
        call = partial(self._client.commit_batch, request)

        def commit() -> pb.Lease:
            lease = self.persist(call, effect=what, finishing=True).lease
            with self._lock:
                return self.membership.committed(request, lease)

        return commit

    def report(self, done: WorkDone) -> None:
        """Reports finished work other than batches."""
        self.persist(partial(self._client.report_work, self.membership.report(done)))

    def leave(self, reason: str, *, fatal: bool = False) -> None:
        """Returns all leases, best effort, within ``2 * FAREWELL_S``."""
        if not self.membership.worker:
            return
        try:
            self._heartbeat(FAREWELL_S)
            self._client.leave_worker(self.membership.leave(reason, fatal), FAREWELL_S)
        except PsError as error:
            log.info("could not say goodbye to the coordinator", reason=str(error))

    def persist(
        self, call: Callable[[], Response], *, effect: str = "", finishing: bool = False
    ) -> Response:
        """Repeats ``call`` while the coordinator is unreachable; also raises as :meth:`check`."""
        self.check(finishing=finishing)
        try:
            patience = Patience(self._client, self.connect_timeout_s, log.info, self._interrupted)
            return patience.persist(call, effect)
        except PsError:
            # If a signal or the end of the job cut the wait short, raise that instead.
            self.check()
            raise

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
                # The trainer's own calls decide when to give up; a long step makes none.
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
        if response.slices:
            self.host(response.slices)

    def _tell(self, change: Callable[[], None]) -> None:
        """Changes the membership, and interrupts the trainer's thread if it must stop now."""
        with self._lock:
            change()
            if not self.membership.interrupted:
                return
            self._interrupted.set()
            at_once = self.membership.outdated
            interrupts = tuple(self._interrupts)
        for interrupt in interrupts:
            interrupt(at_once)
