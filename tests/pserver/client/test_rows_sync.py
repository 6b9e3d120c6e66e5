"""Rows of a sync shard over real gRPC: staging, rounds, and the bits of the mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from pserver.client.client import ShardClient
from pserver.engine.engine import ShardEngine
from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidArgument, JobFailed, ResourceExhausted
from psrpc.core.plan import Plan
from psrpc.core.tables import Rows
from tests.pserver.client.test_sync_service import decision
from tests.pserver.rows_cases import (
    ITEM,
    USER,
    Model,
    assert_rows,
    gradients_of,
    pulled_rows,
    push_of,
    tables_plan,
    wanting,
)
from tests.pserver.shards import (
    INITIAL,
    TRANSPORTS,
    Sink,
    Transport,
    counting,
    engine_of,
    fence_of,
    leased,
    served,
    signed,
    whole,
)

PLAN = tables_plan()
A, B, C = BatchId(0, 0, 10), BatchId(0, 10, 10), BatchId(0, 20, 7)
ALL = {USER: np.arange(1000), ITEM: np.arange(1000)}


@pytest.fixture
def engine() -> ShardEngine:
    return engine_of(PLAN, replicas=3, sink=Sink())


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Transport:
    found: Transport = request.param
    return found


@pytest.fixture
def client(transport: Transport, engine: ShardEngine) -> Iterator[ShardClient]:
    with served(engine, transport=transport, rows_nbytes=1 << 16) as client:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        yield client


def stage(
    client: ShardClient, batch: BatchId, attempt: int, rows: Mapping[int, Rows], plan: Plan = PLAN
) -> str:
    push = push_of(plan, batch, rows, attempt=attempt)
    return client.push(fence_of(client), push).outcome


def mean(weights: tuple[int, ...], parts: tuple[Mapping[int, Rows], ...]) -> dict[int, Rows]:
    """Σ w_k g_k of each id in the order given, id by id."""
    total = sum(weights)
    found = {}
    for table in (USER, ITEM):
        sums: dict[int, np.ndarray] = {}
        for n, part in zip(weights, parts, strict=True):
            for one, row in zip(part[table].ids.tolist(), part[table].values, strict=True):
                summand = np.float32(n / total) * row
                sums[one] = sums[one] + summand if one in sums else summand
        ids = np.array(sorted(sums))
        found[table] = Rows(ids, np.array([sums[one] for one in ids.tolist()]))
    return found


def test_a_round_is_the_weighted_mean_of_rows_in_batch_order(client: ShardClient) -> None:
    third = {t: Rows(rows.ids, gradients_of(3)[t].values) for t, rows in gradients_of(1).items()}
    parts = (gradients_of(1), gradients_of(1, 20), third)
    for batch, attempt, number in ((C, 5, 2), (A, 1, 0), (B, 3, 1)):
        assert stage(client, batch, attempt, parts[number]) == "staged"
    assert_rows(pulled_rows(client, ALL), Model(PLAN), ALL)
    # Some ids are of all parts, some of one.
    assert set(parts[0][USER].ids) < set(parts[1][USER].ids) | set(third[USER].ids)
    assert set(parts[0][USER].ids) & set(parts[1][USER].ids)
    model = Model(PLAN)
    model.subtract(mean((10, 10, 7), parts))
    wanted = wanting(client, ALL)
    into = whole(PLAN)
    info = client.pull(fence_of(client), 1, into, signed(decision((C, 5), (A, 1), (B, 3))), wanted)
    assert info.version == 1
    assert_rows(wanted.into, model, ALL)
    np.testing.assert_allclose(into["float32.trainable"], counting(PLAN)["float32.trainable"] - 1)


def test_of_two_attempts_the_rows_of_the_named_one_count(client: ShardClient) -> None:
    stage(client, A, 1, gradients_of(1))
    stage(client, A, 2, gradients_of(2))
    model = Model(PLAN)
    model.subtract(gradients_of(2))
    assert_rows(pulled_rows(client, ALL, 1, decision((A, 2))), model, ALL)
    assert stage(client, A, 1, gradients_of(1)) == "already_applied"
    # A decision that comes again changes nothing.
    assert_rows(pulled_rows(client, ALL, 1, decision((A, 2))), model, ALL)


def test_staged_rows_are_not_the_workers_memory(client: ShardClient, transport: Transport) -> None:
    rows = gradients_of(1)
    stage(client, A, 1, rows)
    if transport == "shared memory":
        client.workspace.row_outbox[0].fill(0xFF)  # type: ignore[attr-defined]  # it shares memory
    model = Model(PLAN)
    model.subtract(rows)
    assert_rows(pulled_rows(client, ALL, 1, decision((A, 1))), model, ALL)


def test_skipped_micro_batches_take_no_part_in_the_mean_of_rows(client: ShardClient) -> None:
    client.push(fence_of(client), leased("worker-1", A, 1, 0, None, gradients_of(1)))
    stage(client, B, 2, gradients_of(2))
    model = Model(PLAN)
    model.subtract(gradients_of(2))
    assert_rows(pulled_rows(client, ALL, 1, decision((A, 1), (B, 2))), model, ALL)


def test_a_table_may_be_in_some_of_the_micro_batches_only(client: ShardClient) -> None:
    both, users = gradients_of(1), {USER: gradients_of(2)[USER]}
    stage(client, A, 1, both)
    stage(client, B, 2, users)
    stage(client, C, 3, {})
    model = Model(PLAN)
    none = Rows(np.empty(0, np.int64), np.empty((0, 3), np.float32))
    zero = {USER: none, ITEM: none}
    model.subtract(mean((10, 10, 7), (both, zero | users, zero)))
    assert_rows(pulled_rows(client, ALL, 1, decision((A, 1), (B, 2), (C, 3))), model, ALL)


def test_gradients_that_cannot_be_applied_are_not_staged(client: ShardClient) -> None:
    rows = gradients_of(1)
    rows[USER].values[0, 0] = np.inf
    with pytest.raises(InvalidArgument, match=f"'user'.*{rows[USER].ids[0]}"):
        stage(client, A, 1, rows)
    assert client.get_status().staged_now == 0
    assert stage(client, A, 1, gradients_of(1)) == "staged"


def test_memory_of_what_was_staged_comes_back(client: ShardClient, engine: ShardEngine) -> None:
    for number in range(4):
        batch = BatchId(0, 10 * number, 10)
        push = push_of(PLAN, batch, gradients_of(number), base=number)
        client.push(fence_of(client), push)
        pulled_rows(client, ALL, number + 1, decision((batch, 1), number=number))
    assert engine._intake.pool.in_use == 0


def test_a_round_without_room_for_its_rows_fails_the_job(transport: Transport) -> None:
    """Each attempt has room, both together have not; the round was decided, and other shards
    may have applied it."""
    plan = tables_plan(max_rows=10)
    engine = engine_of(plan, replicas=3)
    with served(engine, transport=transport, rows_nbytes=1 << 16) as client:
        client.initialize(fence_of(client), counting(plan), INITIAL)
        for number, batch in enumerate((A, B)):
            ids = np.arange(6) + 10 * number
            stage(client, batch, 1, {USER: Rows(ids, np.ones((6, 4), np.float32))}, plan)
        with pytest.raises(ResourceExhausted, match="table 'user' is full"):
            pulled_rows(client, ALL, 1, decision((A, 1), (B, 1)))
        assert "table 'user' is full" in engine.failure
        with pytest.raises(JobFailed, match="table 'user' is full"):
            pulled_rows(client, ALL)
        assert not engine.applied().to_epochs()
        left = engine._held.values().arrays["float32.trainable"]
        np.testing.assert_array_equal(left, counting(plan)["float32.trainable"])


def test_rounds_of_a_job_with_tables_alone(transport: Transport) -> None:
    plan = tables_plan(arenas=False)
    with served(engine_of(plan, replicas=2), transport=transport, rows_nbytes=1 << 16) as client:
        client.initialize(fence_of(client), {}, INITIAL)
        fence = fence_of(client)
        rows = {A: gradients_of(1), B: {}}
        for batch in (A, B):
            pushed = client.push(fence, leased("worker-1", batch, 1, 0, {}, rows[batch]))
            assert pushed.outcome == "staged"
        model = Model(plan)
        model.subtract(gradients_of(1), 0.5)
        wanted = wanting(client, ALL)
        info = client.pull(fence, 1, {}, signed(decision((A, 1), (B, 1))), wanted)
        assert info.version == 1
        assert_rows(wanted.into, model, ALL)
