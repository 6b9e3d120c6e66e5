"""A shard's gRPC server: the ParameterServer service and the standard health service."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pserver.engine.engine import ShardEngine
from pserver.server.servicer import ParameterServerServicer
from pserver.transport.data_listener import DataListener
from pserver.wire.messages import SERVICE
from psrpc.core.errors import NotReady
from psrpc.net.channel import bind, make_server, parse_address
from psrpc.net.health import LIVES, HealthServicer, offer_reflection
from psrpc.net.limits import CONVERSATIONS, MORE_THREADS
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.wire.interceptor import ErrorInterceptor


class ShardServer:
    """Listens after ``start``, and answers data calls after ``open`` has given it an engine.
    Thread-safe once started. As a context manager it starts on entry and stops on exit."""

    def __init__(
        self,
        shard: int,
        address: str,
        conversations: int = CONVERSATIONS,
        security: Security = PLAINTEXT,
        reflection: bool = False,
        data_port: int | None = None,
    ) -> None:
        """Args:
        address: HOST:PORT to listen on, port 0 for any.
        conversations: maximum number of conversations at once; a further one gets NotReady.
        security: the certificates of this process.
        reflection: whether to describe the services to callers on any address, not only on
            loopback.
        data_port: port for data connections on the host of ``address``; 0 for any, None disables
            them.
        """
        self._shard = shard
        self._address = address
        self._conversations = conversations
        self._security = security
        self._reflection = reflection
        self._data_port = data_port
        self._data: DataListener | None = None
        self._engine: ShardEngine | None = None
        self._server: grpc.Server | None = None
        self._servicer: ParameterServerServicer | None = None
        self._health = HealthServicer()
        self.port = 0

    def start(self) -> int:
        """Listens; returns the port. Raises PortInUse, InvalidArgument."""
        server = make_server(
            self._conversations + MORE_THREADS, [ErrorInterceptor()], self._security
        )
        if self._data_port is not None:
            host, _ = parse_address(self._address)
            self._data = DataListener(host, self._data_port, sealed=self._security.encrypted)
        servicer = self._servicer = ParameterServerServicer(
            self._engine_or_refuse, self._conversations, self._data
        )
        server.add_generic_rpc_handlers((handlers(servicer),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        offer_reflection(server, (SERVICE,), self._address, self._reflection)
        # A shard that waits for the coordinator or restores a checkpoint is alive, and supervisors
        # must not restart it. A separate health service says whether it serves.
        self._set_health(health_pb2.HealthCheckResponse.SERVING, LIVES)
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING, SERVICE)
        # `bind` also checks that this address may be open to other hosts.
        self.port = bind(server, self._address, self._security)
        if self._data is not None:
            self._data.start()
        server.start()
        self._server = server
        return self.port

    def open(self, engine: ShardEngine) -> None:
        """Starts to answer data calls."""
        self._engine = engine
        self._set_health(health_pb2.HealthCheckResponse.SERVING, SERVICE)

    def stop(self, grace_s: float) -> None:
        """Accepts no more calls, and waits up to ``grace_s`` for the calls in flight."""
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING, LIVES, SERVICE)
        if self._engine is not None:
            self._engine.close()
        if self._server is not None and self._servicer is not None:
            stopped = self._server.stop(grace_s)
            # After server.stop, so that no new conversation begins.
            self._servicer.close()
            stopped.wait()
        if self._data is not None:
            self._data.stop()

    def __enter__(self) -> ShardServer:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop(grace_s=0)

    @property
    def data_port(self) -> int | None:
        """The port for data connections; None if they are disabled."""
        return None if self._data is None else self._data.port

    @property
    def engine(self) -> ShardEngine | None:
        """The engine that answers data calls; None while the shard is starting."""
        return self._engine

    def _engine_or_refuse(self) -> ShardEngine:
        if self._engine is None:
            raise NotReady(f"shard {self._shard} is starting: it builds its update engine")
        return self._engine

    def _set_health(
        self, status: health_pb2.HealthCheckResponse.ServingStatus, *services: str
    ) -> None:
        for name in services:
            self._health.set(name, status)


def handlers(servicer: ParameterServerServicer) -> grpc.GenericRpcHandler[Any, Any]:
    """Returns the gRPC handlers for all methods of ``servicer``."""
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Initialize": grpc.stream_unary_rpc_method_handler(
            servicer.initialize, response_serializer=pb.InitializeResponse.SerializeToString
        ),
        "Pull": grpc.unary_stream_rpc_method_handler(
            servicer.pull, request_deserializer=pb.PullRequest.FromString
        ),
        "PushGradients": grpc.stream_unary_rpc_method_handler(
            servicer.push_gradients, response_serializer=pb.PushGradientsResponse.SerializeToString
        ),
        "Exchange": grpc.stream_stream_rpc_method_handler(servicer.exchange),
        "LookUp": grpc.unary_unary_rpc_method_handler(
            servicer.look_up,
            request_deserializer=pb.LookUpRequest.FromString,
            response_serializer=pb.LookUpResponse.SerializeToString,
        ),
        "GetStatus": grpc.unary_unary_rpc_method_handler(
            servicer.get_status,
            request_deserializer=pb.GetStatusRequest.FromString,
            response_serializer=pb.GetStatusResponse.SerializeToString,
        ),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)
