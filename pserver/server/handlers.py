"""How gRPC finds the methods of a shard. Tensor streams stay bytes, see psrpc.wire.codec."""

from __future__ import annotations

from typing import Any

import grpc

from pserver.server.servicer import ParameterServerServicer
from pserver.wire.messages import SERVICE
from psrpc.v1 import parameter_server_pb2 as pb


def handlers(servicer: ParameterServerServicer) -> grpc.GenericRpcHandler[Any, Any]:
    """All methods of one servicer."""
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Initialize": grpc.stream_unary_rpc_method_handler(
            servicer.initialize, response_serializer=pb.InitializeResponse.SerializeToString
        ),
        "Pull": grpc.unary_stream_rpc_method_handler(
            servicer.pull, request_deserializer=pb.PullRequest.FromString
        ),
        "PushGradients": grpc.stream_unary_rpc_method_handler(
            servicer.push_gradients,
            response_serializer=pb.PushGradientsResponse.SerializeToString,
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
