"""The coordinator's gRPC server."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.certificates.audit import AuditLog
from coordinator.dashboard.snapshots import DashboardSnapshots
from coordinator.job.engine import Engine
from coordinator.rpc.heartbeat_bridge import BridgedHealthServicer, Crossing, LoopThread, Pulse
from coordinator.rpc.servicer import Servicer
from coordinator.rpc.status import Surroundings
from psrpc.core.errors import CoordinatorRefuses, InvalidJob, JobDone, Preparing, PsError
from psrpc.net.channel import bind, make_aio_server
from psrpc.net.health import LIVES, offer_reflection
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1.coordinator_pb2_grpc import add_CoordinatorServicer_to_server
from psrpc.wire.interceptor import AioErrorInterceptor

FIRST_WORDS = {"GetJob", "RegisterShard"}
"""First calls of a process, which holds no state yet."""

SERVICE = "psrpc.v1.Coordinator"
"""Name of the Coordinator service in the health service."""

GRACE_S = 2.0
"""Grace period of calls in flight when the server stops."""


class Server:
    """Listens from ``bind`` on, so that a port in use shows before any slow work, and serves its
    job from ``start`` on. In between it answers that it reads the job, which proves that it lives.
    Used within the job's event loop; a thread of its own serves the network, see
    :mod:`coordinator.rpc.heartbeat_bridge`."""

    def __init__(
        self, address: str, security: Security = PLAINTEXT, reflection: bool = False
    ) -> None:
        """
        Args:
            address: HOST:PORT; port 0 lets the system choose.
            security: the credentials of this process.
            reflection: whether to describe the services to callers on any address, not only on
                loopback.
        """
        self._address = address
        self._security = security
        self._reflection = reflection
        self._network = LoopThread("network")
        self._server: grpc.aio.Server | None = None
        self._crossing: Crossing | None = None
        self._servicer: Servicer | None = None
        self._bound_at = 0.0
        self._pulse = Pulse()
        self._beating: asyncio.Task[None] | None = None
        self._health = BridgedHealthServicer(self._pulse)
        self._refused: PsError | None = None
        self.preparing = "reading its job"
        """Continues "the coordinator is", in the answer before :meth:`start`."""
        self.port = 0

    def bind(self) -> int:
        """Takes the port and returns it. Raises PortInUse, InvalidArgument."""
        self._bound_at = time.monotonic()
        job = asyncio.get_running_loop()
        self._crossing = Crossing(job, self._pulse, self._why_closed)
        self._network.start()
        try:
            self.port = self._network.call(self._listen(self._crossing))
        except BaseException:
            self._network.stop()
            raise
        return self.port

    async def start(
        self, engine: Engine, board: DashboardSnapshots | None = None, audit: AuditLog | None = None
    ) -> None:
        """Serves ``engine`` from now on, and ``board`` to dashboards. Records in ``audit`` the
        changes that callers make."""
        assert self._crossing is not None, "bind first"
        surroundings = Surroundings(engine.run.run_dir, self._security.insecure)
        servicer = self._servicer = Servicer(engine, surroundings, board, audit)
        self._beating = asyncio.create_task(self._pulse.beat())
        self._crossing.open(servicer)
        await self._network.run(self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING))

    @property
    def closed(self) -> bool:
        """Whether the server listens but serves no job."""
        return self._server is not None and self._servicer is None

    def refuse(self, why: PsError) -> None:
        """Answers calls with ``why`` from now on: there is no run to serve."""
        self._refused = why

    def status(self) -> pb.GetJobStatusResponse:
        """Returns the answer of GetJobStatus, once started. Only on the event loop's thread."""
        assert self._servicer is not None, "start first"
        return self._servicer.status()

    async def stop(self) -> None:
        """Ends calls in flight and takes no more; may be called twice."""
        server, self._server = self._server, None
        if server is not None:
            await self._network.run(self._end(server))
            self._network.stop()
        if self._beating is not None:
            self._beating.cancel()

    async def _listen(self, crossing: Crossing) -> int:
        server = make_aio_server([AioErrorInterceptor()], self._security)
        add_CoordinatorServicer_to_server(crossing, server)  # type: ignore[no-untyped-call]  # generated
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        offer_reflection(server, (SERVICE,), self._address, self._reflection)
        await self._health.set(LIVES, health_pb2.HealthCheckResponse.SERVING)
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        port = bind(server, self._address, self._security)
        await server.start()
        self._server = server
        return port

    def _why_closed(self, method: str) -> PsError:
        """Returns the error of calls before ``start``."""
        if self._refused is not None:
            return refusal(self._refused, method)
        waited_s = time.monotonic() - self._bound_at
        return Preparing(f"the coordinator is {self.preparing} ({waited_s:.0f} s so far)")

    async def _end(self, server: grpc.aio.Server) -> None:
        await self._health.enter_graceful_shutdown()
        await server.stop(GRACE_S)

    async def __aenter__(self) -> Server:
        self.bind()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()


def refusal(why: PsError, method: str) -> PsError:
    """Returns the error of a call of ``method``. A process that may hold part of the run gets
    CoordinatorRefuses and waits for a coordinator that serves the run, so that a corrected command
    finds its state."""
    if isinstance(why, JobDone):
        return why
    if method in FIRST_WORDS:
        return InvalidJob(f"the coordinator refuses to start: {why}", code=why.code)
    return CoordinatorRefuses(f"the coordinator refuses to start: {why.coded}")
