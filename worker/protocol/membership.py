"""A worker's membership: its identity, its generation and its pending reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from psrpc import SOFTWARE
from psrpc.core.errors import PsError, StaleGeneration
from psrpc.ops.exit_status import DONE, DRAINED
from psrpc.v1 import coordinator_pb2 as pb
from worker.protocol.actions import WorkDone
from worker.protocol.done import DoneBatch, DoneBatches, Stopped, raise_shutdown


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat in flight, with the context to judge its reply."""

    request: pb.HeartbeatWorkerRequest
    sent: tuple[DoneBatch, ...]
    registration: int


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A request for work in flight."""

    request: pb.LeaseWorkRequest
    sent: tuple[DoneBatch, ...]


class WorkerMembership:
    """Makes every request of a worker to its coordinator and processes the replies, in any order.
    Pure; not thread-safe.

    A worker *registers* and *joins* a generation. After it :meth:`rejoins`, late replies to
    earlier requests change nothing.
    """

    def __init__(self, incarnation: int, secret: bytes) -> None:
        """``secret`` is 32 random bytes that prove to the coordinator that a registration comes
        from this process."""
        self.worker = ""
        """The name given by the coordinator; empty before the first registration."""
        self.session = b""
        """The credential of this registration for coordinator and shards; empty before the first.
        """
        self.generation = 0
        self.policy = 0
        self.heartbeat_s = 1.0
        self.devices = 1
        """Micro-batches that this worker computes at once."""
        self.hosts = False
        """Whether this process can host slices."""
        self.failure: PsError | None = None
        """Why this worker cannot go on, if it cannot."""
        self.settings_sha256 = ""
        """Hash of the settings that this process has loaded, as received from the coordinator."""
        self._incarnation = incarnation
        self._secret = secret
        # Counts registrations; replies to requests of an earlier one are ignored.
        self._registration = 0
        self._registered = False
        self._joined = False
        # The latest registration that the coordinator said it does not know; 0 for none.
        self._unknown = 0
        # The newest generation that this registration has learned of.
        self._present = 0
        self._stopping: int | None = None
        """The exit status of a worker that was told to leave."""
        self._shutdown: pb.Shutdown | None = None
        self._done = DoneBatches()
        self._received = 0
        self._dropped = False

    def stop(self, status: int = DRAINED) -> None:
        """Makes the worker leave after its current step, with exit status ``status`` unless the job
        is done."""
        self._stopping = status

    def fail(self, error: PsError) -> None:
        """Makes the worker end with ``error``."""
        self.failure = error

    @property
    def leaves_with(self) -> int:
        """The exit status if the worker leaves now."""
        over = self._shutdown
        done = over is not None and not over.failed and not over.reason
        return DONE if done or self._stopping is None else self._stopping

    @property
    def stale(self) -> str:
        """Why this worker must join anew; empty if it need not."""
        if self._registered and self._unknown == self._registration:
            return "the coordinator was restarted, or has taken this worker for gone"
        if self._joined and self._present > self.generation:
            return f"generation {self.generation} is over; the next is {self._present} or later"
        return ""

    @property
    def interrupted(self) -> bool:
        """Whether :meth:`check` raises."""
        return self._stopping is not None or self.outdated

    @property
    def outdated(self) -> bool:
        """Whether no result in flight can matter any more."""
        over = self._shutdown is not None or self.failure is not None
        return over or bool(self.stale)

    def check(self) -> None:
        """Raises the error that ends the current work, if any.

        Raises:
            Stopped: a stop signal arrived, or the job is over.
            JobFailed: the job has failed.
            StaleGeneration: the worker must join anew.
            PsError: :attr:`failure`.
        """
        if self._stopping is not None:
            raise Stopped("told to stop", self.leaves_with)
        if self._shutdown is not None:
            raise_shutdown(self._shutdown)
        if self.failure is not None:
            raise self.failure
        stale = self.stale
        if stale:
            raise StaleGeneration(stale)

    def register(
        self, host: str, pid: int, job_sha256: str, device: str
    ) -> pb.RegisterWorkerRequest:
        """Returns a registration: the first request of all, and the first after :meth:`rejoins`."""
        return pb.RegisterWorkerRequest(
            incarnation=self._incarnation,
            host=host,
            pid=pid,
            job_sha256=job_sha256,
            software=SOFTWARE,
            device=device,
            settings_sha256=self.settings_sha256,
            secret=self._secret,
            hosts=self.hosts,
        )

    def registered(self, response: pb.RegisterWorkerResponse) -> None:
        """Records a successful registration, with the name that the coordinator gives."""
        self._registration += 1
        self._registered = True
        self._present = 0
        if response.worker != self.worker:
            # The shards' receipts are in the former name; the coordinator leases those batches
            # again.
            self._done.clear()
        self.worker, self.session = response.worker, response.session
        self.heartbeat_s = response.heartbeat_s or self.heartbeat_s

    def get_cluster(self) -> pb.GetClusterRequest:
        """Returns the request for the shards' addresses."""
        return pb.GetClusterRequest(session=self.session)

    def joined(self, cluster: pb.GetClusterResponse) -> None:
        """Records that the worker has joined the cluster's generation, with no leases yet. Drops
        reports of another generation or policy."""
        if (cluster.generation, cluster.policy) != (self.generation, self.policy):
            self._done.clear()
            self._received = 0
        self.generation, self.policy = cluster.generation, cluster.policy
        self._joined = self._dropped = True

    def rejoins(self) -> None:
        """Gives up registration and generation; :meth:`register` comes next."""
        self._registered = self._joined = False

    def done(self, batch: DoneBatch) -> None:
        """Queues ``batch`` for the next heartbeat or lease."""
        self._done.add(batch)

    def lease(self) -> LeaseRequest:
        """Returns a request for work, with the pending reports."""
        sent = self._done.pending()
        request = pb.LeaseWorkRequest(
            session=self.session,
            generation=self.generation,
            policy=self.policy,
            done=[done.message() for done in sent],
            # With 0 the coordinator repeats its leases, which this worker has dropped.
            received=0 if self._dropped else self._received,
            rounds_ahead=True,
            clocks=True,
            devices=self.devices,
        )
        return LeaseRequest(request, sent)

    def leased(self, asked: LeaseRequest, lease: pb.Lease) -> None:
        """Processes the reply to ``asked``."""
        self._done.acknowledge(asked.sent)
        if asked.request.generation != self.generation:
            return
        # The coordinator leases evaluations before it repeats leases, so after one of them the next
        # request must still ask for the repetition.
        self._dropped = self._dropped and lease.WhichOneof("work") in ("evaluate", "merge")
        self._take_in(lease)

    def committed(self, asked: pb.CommitBatchRequest, lease: pb.Lease) -> pb.Lease:
        """Records and returns the lease that came with the reply to ``asked``."""
        if asked.generation == self.generation:
            self._take_in(lease)
        return lease

    def _take_in(self, lease: pb.Lease) -> None:
        attempts = [*lease.train.batches, *(each.attempt for each in lease.rounds.attempts)]
        self._received = max([self._received, *(attempt.attempt for attempt in attempts)])

    def commit(self, round_number: int, done: DoneBatch) -> pb.CommitBatchRequest:
        """Returns the commit of an attempt that all shards hold (sync)."""
        return pb.CommitBatchRequest(
            session=self.session,
            generation=self.generation,
            policy=self.policy,
            round=round_number,
            report=done.message(),
            rounds_ahead=True,
            devices=self.devices,
        )

    def report(self, done: WorkDone) -> pb.ReportWorkRequest:
        """Returns the report of work other than batches."""
        request = pb.ReportWorkRequest(session=self.session, generation=self.generation)
        if isinstance(done, pb.InitializeDone):
            request.initialized.CopyFrom(done)
        elif isinstance(done, pb.EvaluateDone):
            request.evaluated.CopyFrom(done)
        else:
            request.merged.CopyFrom(done)
        return request

    def leave(self, reason: str, fatal: bool = False) -> pb.LeaveWorkerRequest:
        """Returns the worker's last request."""
        return pb.LeaveWorkerRequest(session=self.session, reason=reason, fatal=fatal)

    def beat(
        self,
        waiting_for: str,
        times: pb.WorkerTimes | None = None,
        unreachable: Mapping[int, float] | None = None,
        position: pb.WorkerPosition | None = None,
    ) -> Beat | None:
        """Returns the next heartbeat; None while the worker is not registered.

        Args:
            times: where this process's time has gone since it started.
            unreachable: silent shards, with the seconds of silence.
            position: the progress of the main thread.
        """
        if not self._registered:
            return None
        sent = self._done.pending()
        request = pb.HeartbeatWorkerRequest(
            session=self.session,
            generation=self.generation,
            policy=self.policy,
            done=[done.message() for done in sent],
            waiting_for=waiting_for,
            times=times,
            unreachable=[
                pb.UnreachableShard(shard=shard, for_s=for_s)
                for shard, for_s in (unreachable or {}).items()
            ],
            position=position,
        )
        return Beat(request, sent, self._registration)

    def heard(self, beat: Beat, response: pb.HeartbeatWorkerResponse) -> None:
        """Processes the reply to ``beat``, which may come late."""
        if response.HasField("shutdown"):
            self._shutdown = response.shutdown
        if not response.unknown:
            # The coordinator does not record the reports of a worker that it does not know; the
            # first request for work after joining sends them again.
            self._done.acknowledge(beat.sent)
        if beat.registration != self._registration:
            return
        if response.unknown:
            self._unknown = beat.registration
        self._present = max(self._present, response.generation)
