"""A worker that trains, while its certificate is revoked, expires, or is renewed in time: on the
data connection, in shared memory and in calls."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from coordinator.certificates.members import add_member, renew_all, revoke
from pserver.client.client import ShardClient
from pserver.server.server import ShardServer
from pserver.transport.data_transport import WorkerData
from psrpc.core.errors import AccessDenied
from psrpc.net import channel as channel_module
from psrpc.ops.retry import RetryPolicy
from psrpc.security.authorization import AuthorizationInterceptor
from psrpc.security.credentials import Security
from psrpc.security.identity import Role
from psrpc.v1 import types_pb2 as types
from tests.pserver.exchanges import BATCH, NAME, PLAN, normal
from tests.pserver.shards import (
    AUTHORITY,
    INCARNATION,
    counting,
    engine_of,
    leased,
    part,
    session_of,
    whole,
)
from tests.security.conftest import JOB
from tests.security.forgery import forge
from tests.security.test_certificates import NOW, put
from tests.security.test_revocation import LOOK_S, WAIT_S, use

PERSISTENT = RetryPolicy(first_s=0.001, budget_s=WAIT_S)


@contextmanager
def training(
    shard: Security, worker: Security, data: bool, name: str = "worker"
) -> Iterator[ShardClient]:
    """A worker, whose certificate has this common name, that has pulled, by its data connection or
    in calls."""
    with ShardServer(0, "127.0.0.1:0", security=shard, data_port=0 if data else None) as server:
        server.open(engine_of(PLAN))
        address = f"127.0.0.1:{server.port}"
        client = ShardClient(
            address, INCARNATION, PLAN, 0, retry=PERSISTENT, deadline_s=WAIT_S, security=worker
        )
        with client:
            fence = fence_of(client, name)
            grant = AUTHORITY.grant_initialize("worker-1", 1)
            client.initialize(fence, counting(PLAN), grant)
            client.pull(fence, None, whole(PLAN))
            found = client.transport
            assert found is not None
            assert found.kind == ("data connection" if data else "calls")
            yield client


def fence_of(client: ShardClient, name: str = "worker") -> types.Fence:
    return client.fence(1, 1, session_of("worker-1", name))


def push(client: ShardClient, name: str = "worker") -> str:
    gradient = leased("worker-1", BATCH, 1, 0, part(PLAN, normal()))
    return client.push(fence_of(client, name), gradient).outcome


def ended(client: ShardClient) -> None:
    """Waits until the server has ended the standing call, and with it the data connection."""
    call, end = client._exchanger._call, client._exchanger._transport
    assert call is not None
    call._call.exception(timeout=WAIT_S)
    if isinstance(end, WorkerData):
        assert end._ended.wait(WAIT_S)
        assert end._connection.receive_message() is None


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    made = functools.partial(AuthorizationInterceptor, look_s=LOOK_S)
    monkeypatch.setattr(channel_module, "AuthorizationInterceptor", made)


@pytest.mark.parametrize("data", [True, False])
def test_a_revoked_worker_is_cut_off(mine: Path, data: bool) -> None:
    bad = add_member(mine, Role.WORKER, "bad", NOW)
    with training(use(mine, Role.SHARD), use(bad), data, "bad") as client:
        revoke(mine, "bad", NOW)
        ended(client)
        with pytest.raises(AccessDenied) as caught:
            push(client, "bad")
        assert caught.value.code == "PS304"


@pytest.mark.parametrize("data", [True, False])
def test_a_renewal_in_time_loses_no_step(mine: Path, data: bool) -> None:
    """The old certificate expires under the conversation; what was pushed counts once."""
    now = datetime.now(UTC)
    put(mine, Role.WORKER, *forge(mine, f"pserver://{JOB}/worker", days=1, name="worker"))
    shard = Security(Role.SHARD, mine, now=lambda: now)
    with training(shard, use(mine), data) as client:
        assert push(client) == "applied"
        renew_all(mine, NOW)
        now += timedelta(days=2)
        ended(client)
        assert push(client) == "already_applied"
        into = whole(PLAN)
        client.pull(fence_of(client), None, into)
        np.testing.assert_array_equal(into[NAME], counting(PLAN)[NAME] - normal()[NAME])
        found = client.transport
        assert found is not None
        assert found.kind == ("data connection" if data else "calls")


def test_without_a_renewal_the_conversation_ends(mine: Path) -> None:
    now = datetime.now(UTC)
    put(mine, Role.WORKER, *forge(mine, f"pserver://{JOB}/worker", days=1, name="worker"))
    shard = Security(Role.SHARD, mine, now=lambda: now)
    with training(shard, use(mine), data=True) as client:
        now += timedelta(days=2)
        ended(client)
        with pytest.raises(AccessDenied) as caught:
            push(client)
        assert caught.value.code == "PS313"
