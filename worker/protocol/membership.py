"""A worker as its coordinator knows it: who it is, where it stands, what it has to report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from psrpc.core.errors import StaleGeneration
from psrpc.core.exit_status import DONE, DRAINED
from psrpc.core.version import SOFTWARE
from psrpc.v1 import coordinator_pb2 as pb
from worker.protocol.actions import WorkDone
from worker.protocol.done import DoneBatch, DoneBatches, Stopped, raise_shutdown


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat under way, and what it takes to judge its answer."""

    request: pb.HeartbeatWorkerRequest
    sent: tuple[DoneBatch, ...]
    registration: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for work under way."""

    request: pb.LeaseWorkRequest
    sent: tuple[DoneBatch, ...]


class Membership:
    """Makes every request of a worker to its coordinator and takes the answers in, whatever order
    they come in. Pure; not thread-safe.

    A worker *registers* and *joins* a generation; when it has to do so anew it :meth:`rejoins`,
    and answers to what it asked before change nothing any more.
    """

    def __init__(self, incarnation: int, secret: bytes) -> None:
        """``secret`` are 32 random bytes, which prove to the coordinator that a registration is of
        this process."""
        self.worker = ""
        """The name that the coordinator has given; empty before the first registration."""
        self.session = b""
        """What the coordinator and shards know this registration by; likewise."""
        self.generation = 0
        self.policy = 0
        self.heartbeat_s = 1.0
        self.settings_sha256 = ""
        """Of what this process has loaded, as the coordinator said then."""
        self._incarnation = incarnation
        self._secret = secret
        # Counts registrations; answers to what was asked in an earlier one do not matter.
        self._registration = 0
        self._registered = False
        self._joined = False
        # The registration that the coordinator knows nothing of.
        self._unknown = 0
        # The newest generation that this registration has heard of.
        self._present = 0
        self._stopping: int | None = None
        """The exit status of a worker that was told to leave."""
        self._shutdown: pb.Shutdown | None = None
        self._done = DoneBatches()
        self._received = 0
        self._dropped = False

    # -- what ends the present work -----------------------------------------------------------

    def stop(self, status: int = DRAINED) -> None:
        """The worker is to leave after its present step, with this exit status unless the job is
        done."""
        self._stopping = status

    @property
    def leaves_with(self) -> int:
        """The exit status of a worker that leaves now."""
        over = self._shutdown
        done = over is not None and not over.failed and not over.reason
        return DONE if done or self._stopping is None else self._stopping

    @property
    def stale(self) -> str:
        """Why this worker has to join anew; empty while it need not."""
        if self._registered and self._unknown == self._registration:
            return "the coordinator was restarted, or has taken this worker for gone"
        if self._joined and self._present > self.generation:
            return f"generation {self.generation} is over; the next is {self._present} or later"
        return ""

    @property
    def interrupted(self) -> bool:
        """Whether :meth:`check` raises."""
        return self._stopping is not None or self._shutdown is not None or bool(self.stale)

    @property
    def outdated(self) -> bool:
        """Whether nothing that is under way can matter any more."""
        return self._shutdown is not None or bool(self.stale)

    def check(self) -> None:
        """Raises what ends the present work.

        Raises:
            Stopped: a signal said so, or the job is over.
            JobFailed: the job has failed.
            StaleGeneration: the worker has to join anew.
        """
        if self._stopping is not None:
            raise Stopped("told to stop", self.leaves_with)
        if self._shutdown is not None:
            raise_shutdown(self._shutdown)
        stale = self.stale
        if stale:
            raise StaleGeneration(stale)

    # -- joining ------------------------------------------------------------------------------

    def register(
        self, host: str, pid: int, job_sha256: str, device: str
    ) -> pb.RegisterWorkerRequest:
        """The first word, and the first after :meth:`rejoins`."""
        return pb.RegisterWorkerRequest(
            incarnation=self._incarnation,
            host=host,
            pid=pid,
            job_sha256=job_sha256,
            software=SOFTWARE,
            device=device,
            settings_sha256=self.settings_sha256,
            secret=self._secret,
        )

    def registered(self, response: pb.RegisterWorkerResponse) -> None:
        """The coordinator knows this worker from now on, by the name that it says."""
        self._registration += 1
        self._registered = True
        self._present = 0
        if response.worker != self.worker:
            # Shards have vouched for another worker's batches, which are leased again.
            self._done.clear()
        self.worker, self.session = response.worker, response.session
        self.heartbeat_s = response.heartbeat_s or self.heartbeat_s

    def get_cluster(self) -> pb.GetClusterRequest:
        """Asks where the shards are."""
        return pb.GetClusterRequest(session=self.session)

    def joined(self, cluster: pb.GetClusterResponse) -> None:
        """The worker stands at the cluster's generation, with empty hands. What it has to report
        of another one counts no more."""
        if (cluster.generation, cluster.policy) != (self.generation, self.policy):
            self._done.clear()
            self._received = 0
        self.generation, self.policy = cluster.generation, cluster.policy
        self._joined = self._dropped = True

    def rejoins(self) -> None:
        """What this worker held is lost; it registers next."""
        self._registered = self._joined = False

    # -- work ---------------------------------------------------------------------------------

    def done(self, batch: DoneBatch) -> None:
        """To be reported with the next heartbeat or lease."""
        self._done.add(batch)

    def lease(self) -> Asked:
        """Asks for work, and reports."""
        sent = self._done.pending()
        request = pb.LeaseWorkRequest(
            session=self.session,
            generation=self.generation,
            policy=self.policy,
            done=[done.message() for done in sent],
            # After leases were dropped the coordinator has to give them again.
            received=0 if self._dropped else self._received,
        )
        return Asked(request, sent)

    def leased(self, asked: Asked, lease: pb.Lease) -> None:
        """The answer to ``asked``."""
        self._done.acknowledge(asked.sent)
        if asked.request.generation != self.generation:
            return
        # An evaluation comes before what is given again, so that is still to be asked for.
        self._dropped = self._dropped and lease.WhichOneof("work") in ("evaluate", "merge")
        newest = max((attempt.attempt for attempt in lease.train.batches), default=0)
        self._received = max(self._received, newest)

    def commit(self, round_number: int, done: DoneBatch) -> pb.CommitBatchRequest:
        """Sync: all shards hold this attempt."""
        return pb.CommitBatchRequest(
            session=self.session,
            generation=self.generation,
            policy=self.policy,
            round=round_number,
            report=done.message(),
        )

    def report(self, done: WorkDone) -> pb.ReportWorkRequest:
        """Work other than batches is done."""
        request = pb.ReportWorkRequest(session=self.session, generation=self.generation)
        if isinstance(done, pb.InitializeDone):
            request.initialized.CopyFrom(done)
        elif isinstance(done, pb.EvaluateDone):
            request.evaluated.CopyFrom(done)
        else:
            request.merged.CopyFrom(done)
        return request

    def leave(self, reason: str, fatal: bool = False) -> pb.LeaveWorkerRequest:
        """The last word."""
        return pb.LeaveWorkerRequest(session=self.session, reason=reason, fatal=fatal)

    # -- heartbeats ---------------------------------------------------------------------------

    def beat(
        self,
        waiting_for: str,
        times: pb.WorkerTimes | None = None,
        unreachable: Mapping[int, float] | None = None,
        position: pb.WorkerPosition | None = None,
    ) -> Beat | None:
        """The next heartbeat; None while the worker is not registered.

        Args:
            times: where this process's time has gone since it started.
            unreachable: the shards that do not answer, and for how long, in seconds.
            position: how far the main thread has come.
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
        """The answer to ``beat``; it may come late."""
        if response.HasField("shutdown"):
            self._shutdown = response.shutdown
        if not response.unknown:
            # Otherwise nothing was recorded; the reports go with the first lease after joining.
            self._done.acknowledge(beat.sent)
        if beat.registration != self._registration:
            return
        if response.unknown:
            self._unknown = beat.registration
        self._present = max(self._present, response.generation)
