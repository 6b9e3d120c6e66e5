"""The Coordinator service: decodes requests, calls the engine, encodes responses."""

# ruff: noqa: N802  # an RPC has the same name at every layer
from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

from coordinator.certificates.audit import AuditLog
from coordinator.core.work import Report, Wait, Work
from coordinator.dashboard.snapshots import DashboardSnapshots
from coordinator.job.engine import Caller, Engine
from coordinator.membership.membership import LEASE_S
from coordinator.rpc.answers import write_lease
from coordinator.rpc.environment import Surroundings
from coordinator.rpc.messages import (
    read_figures,
    read_holding,
    read_manifest_file,
    read_position,
    read_reports,
    read_standing,
    read_states,
    read_times,
    read_totals,
    read_transports,
    read_unreachable,
)
from coordinator.rpc.status import write_status
from psrpc.core.errors import InvalidArgument, NotReady
from psrpc.core.text import NAME_CHARS, sanitize
from psrpc.core.version import SOFTWARE
from psrpc.security.peer_certificate import peer_of
from psrpc.security.signatures import SECRET_BYTES
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1.coordinator_pb2_grpc import CoordinatorServicer
from psrpc.wire.commands import to_command, to_shutdown

HEARTBEAT_S = 1.0
"""Interval between the heartbeats of a shard or worker."""


Leased = TypeVar("Leased", pb.LeaseWorkResponse, pb.CommitBatchResponse)


class Servicer(CoordinatorServicer):
    """Implements one method per RPC; the proto documents each. A method whose answer may have to
    wait returns the response, or what to await it by: only a wait costs a task."""

    def __init__(
        self,
        engine: Engine,
        surroundings: Surroundings | None = None,
        board: DashboardSnapshots | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """
        Args:
            surroundings: complete the status; without them it holds the state of the course alone.
            board: answers GetDashboard.
            audit: records changes that callers make.
        """
        self._engine = engine
        self._surroundings = surroundings
        self._board = board
        self._audit = audit

    def _note(self, what: str, context: Any, **details: object) -> None:
        if self._audit is not None:
            self._audit.note(what, peer_of(context), context.peer(), **details)

    def _lease(self, work: Work, worker: str) -> pb.Lease:
        run = self._engine.run
        lease = write_lease(work, worker, run.generation, run.policy, self._engine.authority)
        if lease.HasField("initialize"):
            lease.initialize.first_rows = run.description.first_rows
        return lease

    def _worker(self, session: bytes, context: Any) -> str:
        """Returns the name of the calling worker; empty if this job does not know it."""
        peer = peer_of(context)
        return self._engine.worker_of(session, peer.name, peer.serial)

    def _caller(
        self,
        request: pb.LeaseWorkRequest | pb.CommitBatchRequest | pb.ReportWorkRequest,
        context: Any,
        policy: int | None = None,
    ) -> Caller:
        return Caller(self._worker(request.session, context), request.generation, policy)

    def _reports(self, caller: Caller, messages: Iterable[pb.BatchReport]) -> list[Report]:
        """Returns the caller's reports with the outcomes that the shards' receipts prove."""
        return self._engine.vouched(caller.name, caller.generation, read_reports(messages))

    async def GetJob(self, _request: pb.GetJobRequest, _context: Any) -> pb.GetJobResponse:
        run = self._engine.run
        return pb.GetJobResponse(
            run_id=run.run_id,
            job_path=run.job_path,
            job_sha256=run.description.job_sha256,
            overrides=run.overrides,
            mode=run.description.mode,
            replicas=run.description.replicas,
            software=SOFTWARE,
            intra_op_threads=run.description.intra_op_threads,
            data_fingerprint=run.description.data_fingerprint,
            settings_sha256=run.settings_sha256,
        )

    async def RegisterShard(
        self, request: pb.RegisterShardRequest, context: Any
    ) -> pb.RegisterShardResponse:
        run = self._engine.register_shard(
            request.shard,
            request.incarnation,
            _address(request.address),
            sanitize(request.host, NAME_CHARS),
            request.pid,
            request.software,
        )
        self._note(
            "RegisterShard", context, shard=request.shard, at=request.address, host=request.host
        )
        return pb.RegisterShardResponse(
            run_id=run.run_id,
            plan=run.plan.to_json(),
            optimizer=json.dumps(run.description.optimizer).encode(),
            engine=run.description.engine,
            run_dir=str(run.run_dir),
            token=run.token,
            heartbeat_s=HEARTBEAT_S,
            lease_s=LEASE_S,
            wire_dtype=run.description.wire_dtype,
            first_rows=run.description.first_rows,
        )

    async def ReportShardReady(
        self, request: pb.ReportShardReadyRequest, _context: Any
    ) -> pb.ReportShardReadyResponse:
        self._engine.report_shard_ready(
            request.shard, read_standing(request), sanitize(request.error)
        )
        return pb.ReportShardReadyResponse()

    async def HeartbeatShard(
        self, request: pb.HeartbeatShardRequest, context: Any
    ) -> pb.HeartbeatShardResponse:
        unknown, saved = self._engine.heartbeat_shard(
            request.shard,
            request.incarnation,
            request.generation,
            read_figures(request),
            sanitize(request.failure),
            request.revoked,
            request.leaving,
        )
        if request.failure and not unknown:
            self._note("shard failed", context, shard=request.shard, why=request.failure)
        return pb.HeartbeatShardResponse(
            unknown=unknown,
            saved=saved,
            waiting_for=self._engine.forming_waits_for(),
            saving=request.leaving and self._engine.saving,
        )

    async def Watch(
        self, request: pb.WatchRequest, _context: Any
    ) -> AsyncIterator[pb.WatchResponse]:
        commands = self._engine.watch(request.shard, read_holding(request))
        async with aclosing(commands):
            async for command in commands:
                yield to_command(self._engine.authority.with_keys(command))

    async def ReportSnapshot(
        self, request: pb.ReportSnapshotRequest, _context: Any
    ) -> pb.ReportSnapshotResponse:
        self._engine.report_snapshot(
            request.incarnation,
            request.generation,
            request.name,
            read_manifest_file(request),
            sanitize(request.error),
            read_totals(request.epochs),
        )
        return pb.ReportSnapshotResponse()

    async def RegisterWorker(
        self, request: pb.RegisterWorkerRequest, context: Any
    ) -> pb.RegisterWorkerResponse:
        if len(request.secret) != SECRET_BYTES:
            raise InvalidArgument(
                f"a worker registers with a secret of {len(request.secret)} bytes; expected "
                f"{SECRET_BYTES}"
            )
        worker = self._engine.register_worker(
            request.incarnation,
            sanitize(request.host, NAME_CHARS),
            request.pid,
            sanitize(request.device, NAME_CHARS),
            request.job_sha256,
            request.software,
            request.settings_sha256,
            peer_of(context).name,
            request.secret,
            _caller_address(context),
        )
        self._note("RegisterWorker", context, worker=worker.name, host=request.host)
        return pb.RegisterWorkerResponse(
            worker=worker.name, heartbeat_s=HEARTBEAT_S, lease_s=LEASE_S, session=worker.session
        )

    async def HeartbeatWorker(
        self, request: pb.HeartbeatWorkerRequest, context: Any
    ) -> pb.HeartbeatWorkerResponse:
        worker = self._worker(request.session, context)
        unknown, ended = self._engine.heartbeat_worker(
            worker,
            request.generation,
            self._engine.vouched(worker, request.generation, read_reports(request.done)),
            sanitize(request.waiting_for),
            read_times(request.times),
            read_unreachable(request, self._engine.run.plan.shards),
            read_position(request.position),
            transports=read_transports(request, self._engine.run.plan.shards),
        )
        return pb.HeartbeatWorkerResponse(
            unknown=unknown,
            shutdown=to_shutdown(ended) if ended else None,
            generation=self._engine.course.generations.formation.joinable,
        )

    async def GetCluster(
        self, request: pb.GetClusterRequest, context: Any
    ) -> pb.GetClusterResponse:
        worker = self._worker(request.session, context) if request.session else None
        shards = await self._engine.get_cluster(worker)
        run = self._engine.run
        return pb.GetClusterResponse(
            generation=run.generation,
            policy=run.policy,
            plan=run.plan.to_json(),
            shards=[pb.ShardAddress(address=s.address, incarnation=s.incarnation) for s in shards],
        )

    def LeaseWork(
        self, request: pb.LeaseWorkRequest, context: Any
    ) -> pb.LeaseWorkResponse | Awaitable[pb.LeaseWorkResponse]:
        caller = self._caller(request, context, request.policy)
        reports = self._reports(caller, request.done)
        work = self._engine.lease_now(caller, reports, request.received)
        return self._leased(pb.LeaseWorkResponse, work, caller, request.received)

    def CommitBatch(
        self, request: pb.CommitBatchRequest, context: Any
    ) -> pb.CommitBatchResponse | Awaitable[pb.CommitBatchResponse]:
        caller = self._caller(request, context, request.policy)
        (report,) = self._reports(caller, [request.report])
        work = self._engine.commit_now(caller, request.round, report)
        return self._leased(pb.CommitBatchResponse, work, caller, received=0)

    def _leased(
        self, response: Callable[..., Leased], work: Work, caller: Caller, received: int
    ) -> Leased | Awaitable[Leased]:
        """Returns the response with a lease of ``work``, at once unless it has to wait for some."""

        def lease(found: Work) -> Leased:
            return response(lease=self._lease(found, caller.name))

        async def later() -> Leased:
            return lease(await self._engine.await_work(caller, received))

        return later() if isinstance(work, Wait) else lease(work)

    async def ReportWork(
        self, request: pb.ReportWorkRequest, context: Any
    ) -> pb.ReportWorkResponse:
        caller = self._caller(request, context)
        match request.WhichOneof("work"):
            case "initialized":
                self._engine.report_initialized(caller)
            case "evaluated":
                done = request.evaluated
                self._engine.report_evaluated(
                    caller, done.evaluation, done.task, done.records, read_states(done.states)
                )
            case "merged":
                merged = request.merged
                self._engine.report_merged(caller, merged.evaluation, dict(merged.results))
            case _:
                raise InvalidArgument(f"{caller.name} reported work of no kind")
        return pb.ReportWorkResponse()

    async def LeaveWorker(
        self, request: pb.LeaveWorkerRequest, context: Any
    ) -> pb.LeaveWorkerResponse:
        worker = self._worker(request.session, context)
        self._engine.leave_worker(worker, sanitize(request.reason), request.fatal)
        if request.fatal:
            self._note(
                "LeaveWorker", context, worker=worker, fatal=sanitize(request.reason) or True
            )
        return pb.LeaveWorkerResponse()

    async def SetPolicy(self, request: pb.SetPolicyRequest, context: Any) -> pb.SetPolicyResponse:
        number, policy = self._engine.set_policy(request.settings)
        self._note("SetPolicy", context, settings=list(request.settings), policy=number)
        return pb.SetPolicyResponse(policy=number, settings=str(policy))

    async def RevokeWorker(
        self, request: pb.RevokeWorkerRequest, context: Any
    ) -> pb.RevokeWorkerResponse:
        self._engine.revoke_worker(
            request.worker, request.incarnation, sanitize(request.reason), request.bar
        )
        self._note("RevokeWorker", context, worker=request.worker, bar=request.bar)
        return pb.RevokeWorkerResponse()

    async def GetJobStatus(
        self, _request: pb.GetJobStatusRequest, _context: Any
    ) -> pb.GetJobStatusResponse:
        return self.status()

    async def GetDashboard(
        self, _request: pb.GetDashboardRequest, context: Any
    ) -> pb.GetDashboardResponse:
        if self._board is None:
            raise NotReady("the coordinator keeps no history of this run")
        return self._board.message(context.peer())

    def status(self) -> pb.GetJobStatusResponse:
        """Returns the job's status. Only on the event loop's thread."""
        status = write_status(self._engine.course)
        return self._surroundings.describe(status) if self._surroundings else status


def _caller_address(context: Any) -> str:
    """Returns the address of a call as gRPC names it, without the port."""
    address: str = context.peer().rpartition(":")[0]
    return address


def _address(address: str) -> str:
    """Checks a shard's address. Workers dial it unchanged, so sanitizing must not alter it."""
    if sanitize(address, NAME_CHARS) != address:
        raise InvalidArgument(
            f"a shard's address is {address[:NAME_CHARS]!r}; expected HOST:PORT of at most "
            f"{NAME_CHARS} characters"
        )
    return address
