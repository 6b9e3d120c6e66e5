"""The Coordinator service: decodes requests, calls the engine, encodes responses."""

# ruff: noqa: N802  # an RPC has the same name at every layer
from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from coordinator.certificates.audit import AuditLog
from coordinator.core.work import Report, Wait, Work
from coordinator.dashboard.snapshots import DashboardSnapshots
from coordinator.job.engine import Caller, Engine
from coordinator.job.policy_settings import cluster_settings
from coordinator.rpc.messages import (
    read_heartbeat,
    read_hold_end,
    read_registration,
    read_reports,
    read_states,
    write_cluster,
    write_hold,
    write_job,
    write_lease,
    write_session,
    write_shard_job,
    written_settings,
)
from coordinator.rpc.status import Surroundings, write_status
from psrpc.core.errors import InvalidArgument, NotReady
from psrpc.core.text import sanitize
from psrpc.security.peer_certificate import peer_of
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1.coordinator_pb2_grpc import CoordinatorServicer
from psrpc.wire.bounds import DEVICES
from psrpc.wire.commands import to_command, to_shutdown
from psrpc.wire.shard_reports import (
    from_heartbeat,
    from_held,
    from_ready,
    from_registration,
    from_snapshot_report,
)

Leased = TypeVar("Leased", pb.LeaseWorkResponse, pb.CommitBatchResponse)


class Servicer(CoordinatorServicer):
    """Implements one method per RPC; the proto documents each. A method whose answer may have to
    wait returns the response or an awaitable of it, so that only a wait costs a task."""

    def __init__(
        self,
        engine: Engine,
        surroundings: Surroundings | None = None,
        board: DashboardSnapshots | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """
        Args:
            surroundings: complete the status, which otherwise contains only the state of the job.
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

    def _worker(self, session: bytes, context: Any) -> str:
        """Returns the name of the calling worker; empty if this job does not know it."""
        peer = peer_of(context)
        return self._engine.job_run.members.worker_of(session, peer.name, peer.serial)

    def _caller(
        self,
        request: pb.LeaseWorkRequest | pb.CommitBatchRequest | pb.ReportWorkRequest,
        context: Any,
        policy: int | None = None,
    ) -> Caller:
        name = self._worker(request.session, context)
        if isinstance(request, pb.ReportWorkRequest):
            return Caller(name, request.generation, policy)
        clocks = isinstance(request, pb.LeaseWorkRequest) and request.clocks
        devices = min(max(1, request.devices), DEVICES)
        return Caller(name, request.generation, policy, request.rounds_ahead, clocks, devices)

    def _reports(self, caller: Caller, messages: Iterable[pb.BatchReport]) -> list[Report]:
        """Returns the caller's reports with the outcomes that the shards' receipts prove."""
        return self._engine.sessions.vouched(caller.name, caller.generation, read_reports(messages))

    async def GetJob(self, _request: pb.GetJobRequest, _context: Any) -> pb.GetJobResponse:
        return write_job(self._engine.run)

    async def RegisterShard(
        self, request: pb.RegisterShardRequest, context: Any
    ) -> pb.RegisterShardResponse:
        run = self._engine.shards.register(from_registration(request))
        self._note(
            "RegisterShard", context, shard=request.shard, at=request.address, host=request.host
        )
        return write_shard_job(run)

    async def ReportShardReady(
        self, request: pb.ReportShardReadyRequest, _context: Any
    ) -> pb.ReportShardReadyResponse:
        error = sanitize(request.error)
        self._engine.shards.report_ready(request.shard, from_ready(request), error)
        return pb.ReportShardReadyResponse()

    async def HeartbeatShard(
        self, request: pb.HeartbeatShardRequest, context: Any
    ) -> pb.HeartbeatShardResponse:
        unknown, saved = self._engine.shards.heartbeat(from_heartbeat(request))
        if request.failure and not unknown:
            self._note("shard failed", context, shard=request.shard, why=request.failure)
        return pb.HeartbeatShardResponse(
            unknown=unknown,
            saved=saved,
            waiting_for=self._engine.shards.forming_waits_for(),
            saving=request.leaving and self._engine.job_run.departures.saving,
        )

    async def Watch(
        self, request: pb.WatchRequest, _context: Any
    ) -> AsyncIterator[pb.WatchResponse]:
        commands = self._engine.shards.watch(request.shard, from_held(request))
        async with aclosing(commands):
            async for command in commands:
                yield to_command(self._engine.authority.with_keys(command))

    async def ReportSnapshot(
        self, request: pb.ReportSnapshotRequest, _context: Any
    ) -> pb.ReportSnapshotResponse:
        self._engine.shards.report_snapshot(from_snapshot_report(request))
        return pb.ReportSnapshotResponse()

    async def RegisterWorker(
        self, request: pb.RegisterWorkerRequest, context: Any
    ) -> pb.RegisterWorkerResponse:
        address = context.peer().rpartition(":")[0]  # without the port
        registration = read_registration(request, peer_of(context).name, address)
        worker = self._engine.sessions.register(registration)
        self._note("RegisterWorker", context, worker=worker.name, host=request.host)
        return write_session(worker)

    async def HeartbeatWorker(
        self, request: pb.HeartbeatWorkerRequest, context: Any
    ) -> pb.HeartbeatWorkerResponse:
        worker = self._worker(request.session, context)
        beat = read_heartbeat(request, self._engine.run.plan.shards)
        reports = self._engine.sessions.vouched(worker, beat.generation, beat.reports)
        unknown, ended = self._engine.heartbeat_worker(worker, replace(beat, reports=reports))
        return pb.HeartbeatWorkerResponse(
            unknown=unknown,
            shutdown=to_shutdown(ended) if ended else None,
            generation=self._engine.job_run.generations.formation.joinable,
            slices=self._engine.slices_to_host(worker),
        )

    async def GetCluster(
        self, request: pb.GetClusterRequest, context: Any
    ) -> pb.GetClusterResponse:
        worker = self._worker(request.session, context) if request.session else None
        shards = await self._engine.get_cluster(worker)
        return write_cluster(self._engine.run, shards)

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
        """Returns the response with a lease of ``work``, or an awaitable of it if ``work`` is to
        wait."""

        def lease(found: Work) -> Leased:
            engine = self._engine
            return response(lease=write_lease(found, caller.name, engine.run, engine.authority))

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
        self._engine.sessions.leave(worker, sanitize(request.reason), request.fatal)
        if request.fatal:
            self._note(
                "LeaveWorker", context, worker=worker, fatal=sanitize(request.reason) or True
            )
        return pb.LeaveWorkerResponse()

    async def SetPolicy(self, request: pb.SetPolicyRequest, context: Any) -> pb.SetPolicyResponse:
        if asked := cluster_settings(request.settings):
            restart = written_settings(await self._engine.restart_with(asked))
            self._note("SetPolicy", context, settings=list(request.settings), restart=restart)
            return pb.SetPolicyResponse(policy=self._engine.run.policy, restart=restart)
        number, policy = self._engine.set_policy(request.settings)
        self._note("SetPolicy", context, settings=list(request.settings), policy=number)
        return pb.SetPolicyResponse(policy=number, settings=str(policy))

    async def AwaitHold(self, request: pb.AwaitHoldRequest, _context: Any) -> pb.AwaitHoldResponse:
        hold = await self._engine.await_hold(request.after)
        return write_hold(hold, self._engine.job_run)

    async def EndHold(self, request: pb.EndHoldRequest, context: Any) -> pb.EndHoldResponse:
        await self._engine.end_hold(read_hold_end(request))
        if request.restore:
            # Other ends come by the thousand, and only let training go on.
            self._note("EndHold", context, at=request.at, restore=request.restore)
        return pb.EndHoldResponse()

    async def RevokeWorker(
        self, request: pb.RevokeWorkerRequest, context: Any
    ) -> pb.RevokeWorkerResponse:
        self._engine.sessions.revoke(
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
        status = write_status(self._engine.job_run)
        return self._surroundings.describe(status) if self._surroundings else status
