"""A coordinator on a real port that hands out what a test has written down."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from psrpc.core.batch import BatchId
from psrpc.core.errors import PsError
from psrpc.security.signatures import SIGNATURE_BYTES
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.v1.coordinator_pb2_grpc import CoordinatorServicer
from psrpc.wire.commands import from_batch, to_batch
from tests.coordinator.fakes import listening
from tests.pserver.shards import AUTHORITY, grant_of, session_of

WAIT_S = 30.0
FINISHED = pb.Lease(finished=pb.Shutdown())
INITIALIZE = pb.Lease(initialize=pb.InitializeWork())


class ScriptedCoordinator(CoordinatorServicer):
    """Leases come from ``leases`` in order, for commits as well; an error there is raised, a
    function called, and when there is none left the job is finished. ``requests`` are all that
    came, in order; ``worker`` is the name that every worker gets."""

    def __init__(self, cluster: pb.GetClusterResponse | None = None) -> None:
        self.cluster = cluster or pb.GetClusterResponse(generation=1, policy=1)
        self.leases: deque[pb.Lease | PsError | Callable[[], pb.Lease]] = deque()
        self.not_ready: deque[PsError] = deque()
        self.heartbeat = pb.HeartbeatWorkerResponse()
        self.requests: list[Any] = []
        self.worker = "worker-0"
        self.job = pb.GetJobResponse()
        self.address = ""
        self._came = threading.Condition()

    def of(self, kind: type[Any]) -> list[Any]:
        """The requests of one kind so far."""
        with self._came:
            return [request for request in self.requests if isinstance(request, kind)]

    def reports(self) -> dict[int, pb.BatchReport]:
        """Reports on batches, by attempt."""
        with self._came:
            return {r.attempt: r for q in self.requests for r in getattr(q, "done", ())}

    def wait_for(self, kind: type[Any], count: int = 1) -> list[Any]:
        """The requests of one kind, once there are ``count``."""
        with self._came:
            found = [request for request in self.requests if isinstance(request, kind)]
            while len(found) < count:
                assert self._came.wait(WAIT_S), f"{len(found)} of {count} {kind.__name__} came"
                found = [request for request in self.requests if isinstance(request, kind)]
            return found

    def _note(self, request: Any) -> None:
        with self._came:
            self.requests.append(request)
            self._came.notify_all()

    def _next_lease(self, session: bytes) -> pb.Lease:
        lease = self.leases.popleft() if self.leases else FINISHED
        if isinstance(lease, PsError):
            raise lease
        worker = types.Session.FromString(session[SIGNATURE_BYTES:]).worker
        return self._granted(worker, lease() if callable(lease) else lease)

    def _granted(self, worker: str, written: pb.Lease) -> pb.Lease:
        """``written`` with grants for ``worker``, in the generation of the cluster."""
        lease = pb.Lease()
        lease.CopyFrom(written)
        generation = self.cluster.generation
        attempts = [lease.round.attempt] if lease.HasField("round") else [*lease.train.batches]
        attempts += [ahead.attempt for ahead in lease.rounds.attempts]
        for attempt in attempts:
            batch = from_batch(attempt.batch)
            attempt.grant = grant_of(worker, batch, attempt.attempt, generation)
        if lease.HasField("initialize"):
            lease.initialize.grant = AUTHORITY.grant_initialize(worker, generation)
        return lease

    def GetJob(self, request: pb.GetJobRequest, context: Any) -> Any:  # noqa: N802
        return self.job

    def RegisterWorker(self, request: pb.RegisterWorkerRequest, context: Any) -> Any:  # noqa: N802
        self._note(request)
        return pb.RegisterWorkerResponse(
            worker=self.worker, heartbeat_s=0.01, session=session_of(self.worker)
        )

    def HeartbeatWorker(  # noqa: N802
        self, request: pb.HeartbeatWorkerRequest, context: Any
    ) -> Any:
        self._note(request)
        return self.heartbeat

    def GetCluster(self, request: pb.GetClusterRequest, context: Any) -> Any:  # noqa: N802
        self._note(request)
        if self.not_ready:
            raise self.not_ready.popleft()
        return self.cluster

    def LeaseWork(self, request: pb.LeaseWorkRequest, context: Any) -> Any:  # noqa: N802
        self._note(request)
        return pb.LeaseWorkResponse(lease=self._next_lease(request.session))

    def CommitBatch(self, request: pb.CommitBatchRequest, context: Any) -> Any:  # noqa: N802
        self._note(request)
        return pb.CommitBatchResponse(lease=self._next_lease(request.session))

    def ReportWork(self, request: pb.ReportWorkRequest, context: Any) -> Any:  # noqa: N802
        self._note(request)
        return pb.ReportWorkResponse()

    def LeaveWorker(self, request: pb.LeaveWorkerRequest, context: Any) -> Any:  # noqa: N802
        self._note(request)
        return pb.LeaveWorkerResponse()


@contextmanager
def serve_script(
    script: pb.GetClusterResponse | ScriptedCoordinator | None = None,
) -> Iterator[ScriptedCoordinator]:
    """A scripted coordinator, or the one of that cluster, listening."""
    coordinator = script if isinstance(script, ScriptedCoordinator) else ScriptedCoordinator(script)
    with listening(coordinator) as coordinator.address:
        yield coordinator


def attempt_at(batch: BatchId, number: int) -> types.Attempt:
    """The attempt ``number`` at a batch, without a grant."""
    return types.Attempt(batch=to_batch(batch), attempt=number)


def train_task(*attempts: types.Attempt) -> pb.Lease:
    return pb.Lease(train=pb.TrainTask(batches=attempts))
