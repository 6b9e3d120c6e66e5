"""A caller's view of its own connection."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.client.client import CoordinatorClient
from coordinator.membership.membership import LEASE_S
from coordinator.rpc.messages import HEARTBEAT_S
from psrpc.core.errors import CoordinatorUnreachable
from psrpc.v1 import coordinator_pb2 as pb


def test_a_call_after_closing_is_an_error_of_ours() -> None:
    """A heartbeat thread may be about to call when its process closes the connection."""
    client = CoordinatorClient("127.0.0.1:1")
    client.close()
    with pytest.raises(CoordinatorUnreachable, match="was closed here"):
        client.heartbeat_shard(pb.HeartbeatShardRequest())


def test_a_sign_of_life_that_is_lost_does_not_cost_the_lease() -> None:
    """Two may be lost one after the other, and the third still arrives in time."""
    deadlines: list[float] = []

    def answering(response: Any) -> Any:
        def call(_request: Any, timeout: float) -> Any:
            deadlines.append(timeout)
            return response

        return call

    with CoordinatorClient("127.0.0.1:1") as client:
        client._stub = SimpleNamespace(  # type: ignore[assignment]
            HeartbeatShard=answering(pb.HeartbeatShardResponse()),
            HeartbeatWorker=answering(pb.HeartbeatWorkerResponse()),
        )
        client.heartbeat_shard(pb.HeartbeatShardRequest())
        client.heartbeat_worker(pb.HeartbeatWorkerRequest())
    assert len(deadlines) == 2
    for deadline_s in deadlines:
        assert 2 * (HEARTBEAT_S + deadline_s) + HEARTBEAT_S < LEASE_S
