"""The client with which shards and workers call the coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from coordinator.client.command_stream import CommandStream, typed_error
from psrpc.core.errors import (
    CoordinatorRefuses,
    CoordinatorUnreachable,
    PsError,
)
from psrpc.net.channel import open_channel
from psrpc.net.reach import why_unreachable
from psrpc.ops.threads import THREADS, Threads
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.identity import Role
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1.coordinator_pb2_grpc import CoordinatorStub
from psrpc.wire.bounds import shorten

CALL_S = 10.0
"""Deadline of a call that the coordinator answers at once."""

LOOK_ON_S = 5.0
"""Deadline of a status call by a reader that polls the job."""

HEARTBEAT_CALL_S = 3.0
"""Deadline of a heartbeat. A lost one leaves time for two more before the coordinator takes the
sender for gone."""

POLL_S = 20.0
"""Deadline of a call that the coordinator may hold for a few seconds until there is news."""

WATCH_S = 600.0
"""A command stream ends by itself after this time; its owner opens the next one."""

LOOK_S = 1.0
"""Deadline of each step of diagnosing why the coordinator cannot be reached."""

Response = TypeVar("Response", bound=Message)


class CoordinatorClient:
    """One process's connection to the coordinator. Thread-safe.

    Every call has a deadline. A failed call raises the class that the coordinator raised, or

    * :class:`CoordinatorUnreachable` if nothing answers at the address or the connection broke,
    * :class:`DeadlinePassed` if the coordinator took too long.

    Both are ``retryable``, and every RPC of the service is safe to repeat.
    """

    def __init__(
        self, address: str, security: Security = PLAINTEXT, threads: Threads = THREADS
    ) -> None:
        """Connects to ``address`` (HOST:PORT) at the first call."""
        self.address = address
        self.security = security
        self.threads = threads
        self._channel = open_channel(address, security, Role.COORDINATOR)
        self._stub = CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._closed = False
        self.reached = False
        """Whether the coordinator has ever answered; if so, later obstacles may be temporary."""
        self.refusal = ""
        """Why the coordinator that answered last refuses to start; empty if it serves a run."""

    def __enter__(self) -> CoordinatorClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; calls in flight and later ones raise CoordinatorUnreachable."""
        self._closed = True
        self._channel.close()

    def get_job(self) -> pb.GetJobResponse:
        """Returns the job that a worker must load before it registers."""
        return self._call(self._stub.GetJob, pb.GetJobRequest(), pb.GetJobResponse, CALL_S)

    def register_shard(self, request: pb.RegisterShardRequest) -> pb.RegisterShardResponse:
        """Raises AlreadyExists (a process holds the index; names it) or InvalidArgument (no such
        index)."""
        return self._call(self._stub.RegisterShard, request, pb.RegisterShardResponse, CALL_S)

    def report_shard_ready(
        self, request: pb.ReportShardReadyRequest
    ) -> pb.ReportShardReadyResponse:
        """Raises StaleGeneration (the coordinator knows another process or generation)."""
        return self._call(self._stub.ReportShardReady, request, pb.ReportShardReadyResponse, CALL_S)

    def heartbeat_shard(self, request: pb.HeartbeatShardRequest) -> pb.HeartbeatShardResponse:
        """Raises StaleGeneration (the coordinator knows another process under this index)."""
        return self._call(
            self._stub.HeartbeatShard, request, pb.HeartbeatShardResponse, HEARTBEAT_CALL_S
        )

    def watch(self, request: pb.WatchRequest) -> CommandStream:
        """Opens the command stream of a shard; errors come out of its iteration."""
        return CommandStream(self._stub.Watch(request, timeout=WATCH_S), self.address)

    def report_snapshot(self, request: pb.ReportSnapshotRequest) -> pb.ReportSnapshotResponse:
        """Raises StaleGeneration or InvalidArgument (a snapshot that was not ordered)."""
        return self._call(self._stub.ReportSnapshot, request, pb.ReportSnapshotResponse, CALL_S)

    def register_worker(self, request: pb.RegisterWorkerRequest) -> pb.RegisterWorkerResponse:
        """Raises JobMismatch, which names both hashes or both versions."""
        return self._call(self._stub.RegisterWorker, request, pb.RegisterWorkerResponse, CALL_S)

    def heartbeat_worker(
        self, request: pb.HeartbeatWorkerRequest, deadline_s: float = HEARTBEAT_CALL_S
    ) -> pb.HeartbeatWorkerResponse:
        """Sends a heartbeat; the coordinator never refuses it, see its response."""
        return self._call(
            self._stub.HeartbeatWorker, request, pb.HeartbeatWorkerResponse, deadline_s
        )

    def get_cluster(
        self, request: pb.GetClusterRequest, deadline_s: float = POLL_S
    ) -> pb.GetClusterResponse:
        """Raises NotReady, which names the missing shards; a worker gets it after a few seconds,
        and calls again."""
        return self._call(self._stub.GetCluster, request, pb.GetClusterResponse, deadline_s)

    def lease_work(self, request: pb.LeaseWorkRequest) -> pb.LeaseWorkResponse:
        """Requests work. ``request.received`` lets a worker request its next task while it runs the
        present one, and get a lost answer again.

        Raises:
            StaleGeneration: get the cluster again, pull, and request again.
        """
        return self._call(self._stub.LeaseWork, request, pb.LeaseWorkResponse, POLL_S)

    def commit_batch(self, request: pb.CommitBatchRequest) -> pb.CommitBatchResponse:
        """Commits an attempt of the open round; returns the next lease."""
        return self._call(self._stub.CommitBatch, request, pb.CommitBatchResponse, POLL_S)

    def report_work(self, request: pb.ReportWorkRequest) -> pb.ReportWorkResponse:
        """Raises InvalidArgument (the result does not fit the lease)."""
        return self._call(self._stub.ReportWork, request, pb.ReportWorkResponse, CALL_S)

    def leave_worker(
        self, request: pb.LeaveWorkerRequest, deadline_s: float = CALL_S
    ) -> pb.LeaveWorkerResponse:
        """Returns the worker's leases to the coordinator."""
        return self._call(self._stub.LeaveWorker, request, pb.LeaveWorkerResponse, deadline_s)

    def set_policy(
        self, settings: Iterable[str], deadline_s: float = CALL_S
    ) -> pb.SetPolicyResponse:
        """Changes the policy of the running job, or its processes; ``key=value``.

        Raises:
            InvalidJob: settings that do not fit the mode, each other or the job.
            NotReady: another change is under way, or training has not begun.
            JobFailed: the job has ended, or has nothing more to train.
        """
        request = pb.SetPolicyRequest(settings=settings)
        return self._call(self._stub.SetPolicy, request, pb.SetPolicyResponse, deadline_s)

    def await_hold(self, after: int, deadline_s: float = POLL_S) -> pb.AwaitHoldResponse:
        """Waits a few seconds for an attended job to hold, or to be over; see the proto.

        Args:
            after: the batches of the hold that the caller ended last; -1 for none.

        Raises:
            InvalidArgument: the job is not attended.
            DeadlinePassed: there was no answer in ``deadline_s``, which may be shorter than a wait.
        """
        request = pb.AwaitHoldRequest(after=after)
        return self._call(self._stub.AwaitHold, request, pb.AwaitHoldResponse, deadline_s)

    def end_hold(self, at: int, until: int, rate: float | None = None, restore: str = "") -> None:
        """Ends the hold at ``at`` batches; the job trains until ``until`` are done.

        Args:
            rate: multiplies the job's own learning rate from now on; None leaves the factor.
            restore: the name of a changed copy of the hold's checkpoint, in the same directory:
                that of the original with a suffix, as in ``step-00000010.set``. All shards restore
                it first.

        Raises:
            InvalidArgument: the job holds somewhere else, or the hold was ended otherwise.
            CheckpointError: ``restore`` cannot be restored; the hold goes on.
            NotReady: the job does not hold now, as while a lost shard is replaced; try again.
            JobFailed: the job is over.
        """
        request = pb.EndHoldRequest(at=at, until=until, rate=rate, restore=restore)
        self._call(self._stub.EndHold, request, pb.EndHoldResponse, POLL_S)

    def revoke_worker(
        self, worker: str, incarnation: int, reason: str, *, bar: bool
    ) -> pb.RevokeWorkerResponse:
        """Ends a worker's session; with ``bar`` its process may not register again. ``incarnation``
        selects a process, 0 the one that has the name now.

        Raises:
            InvalidArgument: there is no such worker.
        """
        request = pb.RevokeWorkerRequest(
            worker=worker, incarnation=incarnation, reason=reason, bar=bar
        )
        return self._call(self._stub.RevokeWorker, request, pb.RevokeWorkerResponse, CALL_S)

    def get_job_status(self) -> pb.GetJobStatusResponse:
        """Returns the job's status."""
        return self._call(
            self._stub.GetJobStatus, pb.GetJobStatusRequest(), pb.GetJobStatusResponse, CALL_S
        )

    def get_dashboard(self) -> pb.GetDashboardResponse:
        """Returns the dashboard's data; call every few seconds to see the end of the job."""
        return self._call(
            self._stub.GetDashboard, pb.GetDashboardRequest(), pb.GetDashboardResponse, LOOK_ON_S
        )

    def why_unreachable(self) -> PsError | None:
        """Returns the obstacle on the way to the coordinator; None if there is none any more."""
        return why_unreachable(self.address, self.security, Role.COORDINATOR, LOOK_S)

    def raise_if_hopeless(self) -> PsError | None:
        """Returns the obstacle on the way to the coordinator if it may be temporary.

        Raises:
            AccessDenied: only one end uses TLS, or an end refuses the other's certificate.
            InvalidArgument: another program listens at the address.
        """
        cause = self.why_unreachable()
        if cause is not None and not cause.retryable:
            raise cause
        return cause

    def _call(
        self, method: Any, request: Message, expected: type[Response], timeout_s: float
    ) -> Response:
        shorten(request)
        try:
            response = method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            typed = typed_error(error, self.address)
            if isinstance(typed, CoordinatorRefuses):
                self.refusal = str(typed)
            raise typed from None
        except ValueError:
            if not self._closed:
                raise
            # Another thread closed the channel; gRPC has no own error for that.
            raise CoordinatorUnreachable(
                f"the connection to the coordinator at {self.address} was closed here"
            ) from None
        assert isinstance(response, expected)
        self.reached, self.refusal = True, ""
        return response
