from __future__ import annotations

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from psrpc.net.channel import make_server, open_channel
from psrpc.net.health import offer_reflection


@pytest.mark.parametrize(
    ("address", "asked", "described"),
    [
        ("127.0.0.1:0", False, True),
        ("localhost:0", False, True),
        ("0.0.0.0:0", False, False),
        ("0.0.0.0:0", True, True),
    ],
)
def test_services_are_described_on_loopback_or_when_asked_for(
    address: str, asked: bool, described: bool
) -> None:
    server = make_server(2)
    offer_reflection(server, ("psrpc.v1.Coordinator",), address, asked)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with open_channel(f"127.0.0.1:{port}") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            if described:
                assert "psrpc.v1.Coordinator" in database.get_services()
            else:
                with pytest.raises(grpc.RpcError) as caught:
                    database.get_services()
                assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    finally:
        server.stop(None).wait()
