"""The exchanges of a worker with a slice that it hosts, besides those that every transport has
(tests/pserver/client/test_sync_service.py)."""

from __future__ import annotations

import threading

import pytest

from pserver.client.client import ShardClient
from pserver.engine.gate import RoundWaits
from pserver.server.own_process import OwnProcess
from pserver.server.server import ShardServer
from psrpc.core.errors import NotReady, ShardUnreachable
from tests.pserver.shards import (
    INCARNATION,
    INITIAL,
    ONE_TRY,
    engine_of,
    fence_of,
    plan_of,
    served,
    whole,
)

PLAN = plan_of()


def test_a_cancelled_wait_for_a_round_ends_and_the_next_exchange_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(PLAN, replicas=1)
    waits = threading.Event()
    wait = RoundWaits._await

    def noted(self: RoundWaits, *args: object) -> None:
        waits.set()
        wait(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(RoundWaits, "_await", noted)
    with served(engine, transport="own process", deadline_s=3600.0) as client:
        client.initialize(fence_of(client), whole(PLAN), INITIAL)

        def cancel() -> None:
            waits.wait()
            client.cancel()

        cancelling = threading.Thread(target=cancel)
        cancelling.start()
        with pytest.raises(NotReady):
            client.pull(fence_of(client), 1, whole(PLAN))
        cancelling.join()
        assert client.pull(fence_of(client), 0, whole(PLAN)).version == 0


def test_an_ended_slice_is_unreachable() -> None:
    engine = engine_of(PLAN, replicas=1)
    ended = threading.Event()
    own = OwnProcess(engine, "shard 0", "", ended.is_set)
    with ShardServer(0, "127.0.0.1:0") as server:
        server.open(engine)
        where = (f"127.0.0.1:{server.port}", INCARNATION, PLAN, 0)
        with ShardClient(*where, retry=ONE_TRY, local=own) as client:
            client.initialize(fence_of(client), whole(PLAN), INITIAL)
            client.pull(fence_of(client), None, whole(PLAN))
            ended.set()
            with pytest.raises(ShardUnreachable, match="shard 0, in this process, has ended"):
                client.pull(fence_of(client), None, whole(PLAN))
