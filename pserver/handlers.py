"""How gRPC finds the methods of a shard: as the contract has them, and a quicker way to the same.

On the wire a stream of one message is a unary call. gRPC for Python spends half a millisecond less
on a call that it may treat as one, so a client that sends and expects one message each way says so
in the call's metadata and is served by a unary handler. Nothing else differs, and no client has to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc

from pserver.servicer import Context, ParameterServerServicer
from pserver.wire import SERVICE, SINGLE
from psrpc.errors import InvalidArgument
from psrpc.v1 import parameter_server_pb2 as pb

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # no generic when it runs
    """All methods of one servicer. Tensor streams stay bytes, see psrpc.codec."""

    def __init__(self, servicer: ParameterServerServicer) -> None:
        self._streams = _as_streams(servicer)
        self._singles = self._streams | _as_singles(servicer)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """See grpc.GenericRpcHandler."""
        metadata: Any = handler_call_details.invocation_metadata
        chosen = self._singles if SINGLE in metadata else self._streams
        return chosen.get(handler_call_details.method)


def _as_streams(servicer: ParameterServerServicer) -> dict[str, Handler]:
    return {
        f"/{SERVICE}/Initialize": grpc.stream_unary_rpc_method_handler(
            servicer.initialize, response_serializer=pb.InitializeResponse.SerializeToString
        ),
        f"/{SERVICE}/Pull": grpc.unary_stream_rpc_method_handler(
            servicer.pull, request_deserializer=pb.PullRequest.FromString
        ),
        f"/{SERVICE}/PushGradients": grpc.stream_unary_rpc_method_handler(
            servicer.push_gradients,
            response_serializer=pb.PushGradientsResponse.SerializeToString,
        ),
        f"/{SERVICE}/PushPull": grpc.stream_stream_rpc_method_handler(servicer.push_pull),
        f"/{SERVICE}/GetStatus": grpc.unary_unary_rpc_method_handler(
            servicer.get_status,
            request_deserializer=pb.GetStatusRequest.FromString,
            response_serializer=pb.GetStatusResponse.SerializeToString,
        ),
    }


def _as_singles(servicer: ParameterServerServicer) -> dict[str, Handler]:
    def pull(request: pb.PullRequest, context: Context) -> bytes:
        return _only(servicer.pull(request, context))

    def push_gradients(request: bytes, context: Context) -> pb.PushGradientsResponse:
        return servicer.push_gradients(iter((request,)), context)

    def push_pull(request: bytes, context: Context) -> bytes:
        return _only(servicer.push_pull(iter((request,)), context))

    answers: Callable[[pb.PushGradientsResponse], bytes]
    answers = pb.PushGradientsResponse.SerializeToString
    return {
        f"/{SERVICE}/Pull": grpc.unary_unary_rpc_method_handler(
            pull, request_deserializer=pb.PullRequest.FromString
        ),
        f"/{SERVICE}/PushGradients": grpc.unary_unary_rpc_method_handler(
            push_gradients, response_serializer=answers
        ),
        f"/{SERVICE}/PushPull": grpc.unary_unary_rpc_method_handler(push_pull),
    }


def _only(messages: Iterator[bytes]) -> bytes:
    first = next(messages)
    if next(messages, None) is not None:
        raise InvalidArgument(
            f"the call says {SINGLE[0]} but the answer takes several messages; leave it out"
        )
    return first
