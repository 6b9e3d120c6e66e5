"""The exchanges of a worker with a slice that it hosts, besides those that every transport has
(tests/pserver/client/test_sync_service.py)."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from pserver.client.client import ShardClient
from pserver.core.table_ids import RowsWanted
from pserver.engine.gate import RoundWaits
from pserver.server.own_process import OwnProcess
from pserver.server.server import ShardServer
from psrpc.core.batch import BatchId
from psrpc.core.encoding import Encoded
from psrpc.core.errors import (
    AccessDenied,
    InvalidArgument,
    NotReady,
    ShardUnreachable,
    StaleGeneration,
)
from psrpc.core.placement import make_plan
from psrpc.core.plan import VariableSpec
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import to_batch
from tests.pserver.shards import (
    INCARNATION,
    INITIAL,
    ONE_TRY,
    engine_of,
    fence_of,
    leased,
    part,
    plan_of,
    served,
    session_of,
    signed,
    whole,
)

PLAN = plan_of()

WAIT_S = 20.0
"""Longer than anything takes that goes well."""


def test_a_cancelled_wait_for_a_round_ends_and_the_next_exchange_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(PLAN, replicas=1)
    waits = threading.Event()
    wait = RoundWaits._await
    errors: list[BaseException] = []

    def noted(self: RoundWaits, *args: object) -> None:
        waits.set()
        wait(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(RoundWaits, "_await", noted)
    with served(engine, transport="own process", deadline_s=3600.0) as client:
        client.initialize(fence_of(client), whole(PLAN), INITIAL)

        def pull() -> None:
            with pytest.raises(NotReady) as raised:
                client.pull(fence_of(client), 1, whole(PLAN))
            errors.append(raised.value)

        pulling = threading.Thread(target=pull)
        pulling.start()
        try:
            assert waits.wait(WAIT_S)
            client.cancel()
            pulling.join(WAIT_S)
            assert errors
        finally:
            engine.close()
            pulling.join()
        assert client.pull(fence_of(client), 0, whole(PLAN)).version == 0


def test_a_call_of_another_certificate_than_that_of_the_session_is_refused() -> None:
    engine = engine_of(PLAN, replicas=1)
    own = OwnProcess(engine, "shard 0", "worker", lambda: False)
    where = ("127.0.0.1:1", INCARNATION, PLAN, 0)
    with ShardClient(*where, retry=ONE_TRY, local=own) as client:
        renewed = client.fence(1, 1, session_of("worker-1", "worker"))
        with pytest.raises(NotReady, match="a worker to initialize it"):
            client.pull(renewed, None, whole(PLAN))
        with pytest.raises(StaleGeneration, match="registered with certificate '' and calls with"):
            client.pull(fence_of(client), None, whole(PLAN))


def test_a_worker_has_a_copy_of_the_values_of_its_slice() -> None:
    engine = engine_of(PLAN, replicas=1)
    with served(engine, transport="own process") as client:
        client.initialize(fence_of(client), whole(PLAN, 5.0), INITIAL)
        for _ in range(2):
            into = whole(PLAN)
            client.pull(fence_of(client), None, into)
            for array in into.values():
                assert (array == 5.0).all()
                array.fill(6.0)


def test_a_slice_takes_gradients_in_several_buffers_or_without_a_part_of_an_arena() -> None:
    variables = [
        VariableSpec("dense/kernel", (96,), "float32", "trainable"),
        VariableSpec("norm/mean", (5,), "float32", "state"),
    ]
    # The state variable is on the second slice alone.
    plan = make_plan(variables, 2, "cut")
    assert [plan.arenas[1].shard_length(shard) for shard in range(2)] == [0, 5]
    engine = engine_of(plan, replicas=1)
    with served(engine, transport="own process") as client:
        fence, given = fence_of(client), whole(plan, 2.0)
        client.initialize(fence, whole(plan), INITIAL)
        given["float32.trainable"][10:] = 1.0
        pieces = tuple(given["float32.trainable"][at] for at in (slice(10), slice(10, 48)))
        gradient = {
            "float32.trainable": Encoded("plain", pieces),
            "float32.state": Encoded("plain", ()),
        }
        batch = BatchId(0, 0, 10)
        cut = gradient | {"float32.trainable": Encoded("plain", pieces[:1])}
        with pytest.raises(InvalidArgument, match=r"announces 40 bytes of arena .* expected 192"):
            client.push(fence, leased("worker-1", batch, 1, 0, cut))
        client.push(fence, leased("worker-1", batch, 1, 0, gradient))
        attempt = types.Attempt(batch=to_batch(batch), attempt=1)
        decision = signed(types.Decision(generation=1, round=0, attempts=[attempt]))
        rows = RowsWanted({}, {})
        values = whole(plan)
        assert client.pull(fence, 1, values, decision, rows).version == 1
        expected = -given["float32.trainable"][:48]
        np.testing.assert_array_equal(values["float32.trainable"][:48], expected)


def test_a_push_without_the_grant_of_its_lease_is_refused() -> None:
    engine = engine_of(PLAN, replicas=1)
    with served(engine, transport="own process") as client:
        client.initialize(fence_of(client), whole(PLAN), INITIAL)
        push = leased("worker-1", BatchId(0, 0, 10), 1, 0, part(PLAN, whole(PLAN, 1.0)))
        with pytest.raises(AccessDenied):
            client.push(fence_of(client), replace(push, grant=b""))
        assert engine.report().staged_now == 0


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
