"""What a caller sees of its own connection."""

from __future__ import annotations

import pytest

from coordinator.client import CoordinatorClient
from psrpc.errors import CoordinatorUnreachable
from psrpc.v1 import coordinator_pb2 as pb


def test_a_call_after_closing_is_an_error_of_ours() -> None:
    """A heartbeat thread may be about to call when its process closes the connection."""
    client = CoordinatorClient("127.0.0.1:1")
    client.close()
    with pytest.raises(CoordinatorUnreachable, match="was closed here"):
        client.heartbeat_shard(pb.HeartbeatShardRequest())
