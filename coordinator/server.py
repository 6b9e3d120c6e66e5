"""The coordinator on the network."""

from __future__ import annotations

import asyncio
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.board import Board
from coordinator.crossing import Crossing, HealthServicer, LoopThread, Pulse
from coordinator.engine import Engine
from coordinator.refusal import Refusal
from coordinator.servicer import Servicer
from coordinator.surroundings import Surroundings
from psrpc.channel import bind, make_aio_server
from psrpc.errors import PsError
from psrpc.interceptor import AioErrorInterceptor
from psrpc.reflection import describe
from psrpc.security import PLAINTEXT, Security
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1.coordinator_pb2_grpc import add_CoordinatorServicer_to_server

SERVICE = "psrpc.v1.Coordinator"
"""The name by which the health service knows it."""

GRACE_S = 2.0
"""Time that calls in flight get when the server stops."""


class Server:
    """Listens from ``bind`` on and answers from ``start`` on, so that a port in use is found
    before anything slow is done. Used within one event loop, the job's; it has a thread of its own
    for the network, see :mod:`coordinator.crossing`."""

    def __init__(
        self, address: str, security: Security = PLAINTEXT, reflection: bool = False
    ) -> None:
        """Args:
        address: HOST:PORT; port 0 lets the system choose.
        security: this process's.
        reflection: describe the services to callers on any address, not only on loopback.
        """
        self._address = address
        self._security = security
        self._reflection = reflection
        self._network = LoopThread("network")
        self._server: grpc.aio.Server | None = None
        self._servicer: Servicer | None = None
        self._pulse = Pulse()
        self._beating: asyncio.Task[None] | None = None
        self._health = HealthServicer(self._pulse)
        self._answers = False
        self.port = 0

    def bind(self) -> int:
        """Takes the port and returns it. Raises PortInUse, InvalidArgument."""
        self._network.start()
        try:
            self.port = self._network.call(self._listen())
        except BaseException:
            self._network.stop()
            raise
        return self.port

    async def start(self, engine: Engine, board: Board | None = None) -> None:
        """Begins to answer for ``engine``, and from ``board`` to those who look on."""
        assert self._server is not None, "bind first"
        self._answers = True
        surroundings = Surroundings(engine.run.run_dir, self._security.insecure)
        servicer = self._servicer = Servicer(engine, surroundings, board)
        self._beating = asyncio.create_task(self._pulse.beat())
        crossing = Crossing(servicer, asyncio.get_running_loop(), self._pulse)
        await self._network.run(self._serve(self._server, crossing))

    @property
    def silent(self) -> bool:
        """Whether it listens and has not answered anything yet."""
        return self._server is not None and not self._answers

    async def refuse(self, why: PsError) -> None:
        """Begins to answer that there is no run to serve."""
        assert self._server is not None, "bind first"
        self._answers = True
        await self._network.run(self._refuse(self._server, why))

    def status(self) -> pb.GetJobStatusResponse:
        """As GetJobStatus answers, once it has started. Only in the event loop's thread."""
        assert self._servicer is not None, "start first"
        return self._servicer.status()

    async def stop(self) -> None:
        """Takes no more calls and ends those in flight; may be called twice."""
        server, self._server = self._server, None
        if server is not None:
            await self._network.run(self._end(server))
            self._network.stop()
        if self._beating is not None:
            self._beating.cancel()

    async def _listen(self) -> int:
        server = make_aio_server([AioErrorInterceptor()], self._security)
        port = bind(server, self._address, self._security)
        self._server = server
        return port

    async def _serve(self, server: grpc.aio.Server, crossing: Crossing) -> None:
        add_CoordinatorServicer_to_server(crossing, server)  # type: ignore[no-untyped-call]  # generated
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        describe(server, (SERVICE,), self._address, self._reflection)
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await server.start()

    async def _refuse(self, server: grpc.aio.Server, why: PsError) -> None:
        server.add_generic_rpc_handlers((Refusal(SERVICE, why),))
        await server.start()

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
