"""A shard of an async job over real gRPC: pushes, pulls and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pserver.client.client import RetryPolicy, ShardClient
from pserver.client.requests import GradientPush
from pserver.server.server import ShardServer
from psrpc.core.batch import BatchId
from psrpc.core.errors import (
    InvalidArgument,
    JobMismatch,
    NotReady,
    PsError,
    RoundPassed,
    ShardUnreachable,
    StaleGeneration,
)
from psrpc.core.plan import Plan
from psrpc.wire.codec import MAX_CHUNK_BYTES
from tests.pserver.shards import (
    INCARNATION,
    INITIAL,
    ONE_TRY,
    TRANSPORTS,
    NDArray,
    counting,
    engine_of,
    fence_of,
    leased,
    part,
    plan_of,
    served,
    whole,
)

PLAN = plan_of()
FIRST = BatchId(0, 0, 10)
SECOND = BatchId(0, 10, 10)


@pytest.fixture(params=TRANSPORTS)
def client(request: pytest.FixtureRequest) -> Iterator[ShardClient]:
    with served(engine_of(PLAN), transport=request.param) as client:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        yield client


def pulled(client: ShardClient, plan: Plan = PLAN) -> dict[str, NDArray]:
    into = whole(plan, -1.0)
    client.pull(fence_of(client), None, into)
    return into


def push(batch: BatchId, value: float = 1.0, base: int = 0, plan: Plan = PLAN) -> GradientPush:
    return leased("worker-1", batch, 1, base, part(plan, whole(plan, value)))


def assert_equal(found: dict[str, NDArray], expected: dict[str, NDArray]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


def test_initialized_values_are_pulled(client: ShardClient) -> None:
    assert_equal(pulled(client), counting(PLAN))


def test_the_first_initialization_stands(client: ShardClient) -> None:
    assert not client.initialize(fence_of(client), whole(PLAN, 5.0), INITIAL)
    assert_equal(pulled(client), counting(PLAN))


def test_a_push_moves_parameters_against_the_gradient_and_adds_state(client: ShardClient) -> None:
    result = client.push(fence_of(client), push(FIRST, 2.0))
    assert (result.outcome, result.version, result.staleness) == ("applied", 1, 0)
    expected = counting(PLAN)
    expected["float32.trainable"] -= 2
    expected["float32.state"] += 2
    assert_equal(pulled(client), expected)


def test_a_push_that_is_repeated_is_acknowledged_and_ignored(client: ShardClient) -> None:
    fence = fence_of(client)
    client.push(fence, push(FIRST))
    before = pulled(client)
    result = client.push(fence, push(FIRST, 9.0))
    assert (result.outcome, result.version) == ("already_applied", 1)
    into = whole(PLAN)
    result, info = client.push_pull(fence, push(FIRST, 9.0), into)
    assert (result.outcome, info.version) == ("already_applied", 1)
    assert_equal(into, before)
    assert_equal(pulled(client), before)
    assert client.get_status().already_applied == 2


def test_push_pull_brings_back_what_it_made(client: ShardClient) -> None:
    into = whole(PLAN)
    result, info = client.push_pull(fence_of(client), push(FIRST), into)
    assert (result.outcome, info.version, info.generation) == ("applied", 1, 1)
    assert_equal(into, pulled(client))


def test_staleness_counts_the_updates_in_between(client: ShardClient) -> None:
    fence = fence_of(client)
    client.push(fence, push(FIRST))
    result = client.push(fence, push(SECOND, base=0))
    assert (result.staleness, result.version) == (1, 2)
    status = client.get_status()
    assert list(status.staleness_counts) == [1, 1]
    assert (status.version, status.applied, status.refused) == (2, 2, 0)


def test_a_skipped_push_is_recorded_and_changes_nothing(client: ShardClient) -> None:
    fence = fence_of(client)
    skipped = leased("worker-1", FIRST, 1, 0, None)
    into = whole(PLAN)
    result, info = client.push_pull(fence, skipped, into)
    assert (result.outcome, result.version, info.version) == ("skipped", 0, 0)
    assert_equal(into, counting(PLAN))
    assert client.push(fence, push(FIRST)).outcome == "already_applied"
    assert client.get_status().skipped == 1


def test_large_arenas_travel_in_many_chunks() -> None:
    plan = plan_of(size=MAX_CHUNK_BYTES // 4 + 100)
    with served(engine_of(plan)) as client:
        fence = fence_of(client)
        client.initialize(fence, counting(plan), INITIAL)
        client.push(fence, push(FIRST, plan=plan))
        into = whole(plan)
        result, _ = client.push_pull(fence, push(SECOND, base=1, plan=plan), into)
        assert result.outcome == "applied"
        expected = counting(plan)
        expected["float32.trainable"] -= 2
        expected["float32.state"] += 2
        assert_equal(into, expected)


def test_a_worker_reads_each_shard_to_its_own_place() -> None:
    plan = plan_of(shards=2)
    into = whole(plan, -1.0)
    for shard in range(2):
        with served(engine_of(plan, shard)) as client:
            client.initialize(fence_of(client), counting(plan), INITIAL)
            client.pull(fence_of(client), None, into)
    assert_equal(into, counting(plan))


def test_nothing_is_served_before_it_is_initialized() -> None:
    with served(engine_of(PLAN)) as client:
        fence = fence_of(client)
        with pytest.raises(NotReady, match="shard 0 waits for a worker to initialize it"):
            client.pull(fence, None, whole(PLAN))
        with pytest.raises(NotReady, match="initialize"):
            client.push(fence, push(FIRST))
        assert client.get_status().waiting_for == "a worker to initialize it"


def test_nothing_is_served_before_there_is_an_engine() -> None:
    with (
        ShardServer(3, "127.0.0.1:0") as server,
        ShardClient(f"127.0.0.1:{server.port}", 1, PLAN, 0, retry=ONE_TRY) as client,
        pytest.raises(NotReady, match="shard 3 is starting"),
    ):
        client.pull(fence_of(client), None, whole(PLAN))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"generation": 2}, StaleGeneration, "generation 2; shard 0 is in 1"),
        ({"generation": 0}, StaleGeneration, "generation 0; shard 0 is in 1"),
        ({"policy": 2}, StaleGeneration, "policy 2; shard 0 follows 1"),
        ({"shard_incarnation": 5}, StaleGeneration, f"incarnation 5 of shard 0.*{INCARNATION}"),
        ({"plan_hash": b"x"}, JobMismatch, "plan 78; shard 0 holds plan"),
    ],
)
def test_messages_of_another_time_or_place_are_refused(
    client: ShardClient, change: dict[str, object], error: type[PsError], words: str
) -> None:
    fence = fence_of(client)
    for name, value in change.items():
        setattr(fence, name, value)
    before = pulled(client)
    with pytest.raises(error, match=words):
        client.push(fence, push(FIRST))
    with pytest.raises(error, match=words):
        client.push_pull(fence, push(FIRST), whole(PLAN))
    with pytest.raises(error, match=words):
        client.pull(fence, None, whole(PLAN))
    with pytest.raises(error, match=words):
        client.initialize(fence, whole(PLAN), INITIAL)
    assert_equal(pulled(client), before)
    status = client.get_status()
    assert (status.version, status.applied, status.refused) == (0, 0, 2)


def test_a_gradient_from_the_future_is_refused(client: ShardClient) -> None:
    with pytest.raises(InvalidArgument, match="base version 3; shard 0 is at 0"):
        client.push(fence_of(client), push(FIRST, base=3))


def test_a_batch_cut_in_another_way_is_refused(client: ShardClient) -> None:
    client.push(fence_of(client), push(FIRST))
    before = pulled(client)
    with pytest.raises(InvalidArgument, match=r"epoch 1 positions 5\.\.14 were applied in part"):
        client.push(fence_of(client), push(BatchId(0, 5, 10)))
    assert_equal(pulled(client), before)


def test_rounds_and_unknown_snapshots_cannot_be_pulled(client: ShardClient) -> None:
    with pytest.raises(InvalidArgument, match="this job is async"):
        client.pull(fence_of(client), 0, whole(PLAN))
    with pytest.raises(RoundPassed, match="no snapshot 'step-1' is kept; kept are: none"):
        client.pull(fence_of(client), "step-1", whole(PLAN))


def test_a_shard_that_is_gone_is_named() -> None:
    with served(engine_of(PLAN)) as client:
        address = client.peer.rpartition(" ")[2]
    heard: list[str] = []
    retry = RetryPolicy(first_s=0.001, longest_s=0.001, budget_s=0.02)
    with (
        ShardClient(address, 1, PLAN, 0, retry=retry, announce=heard.append) as client,
        pytest.raises(ShardUnreachable, match=f"shard 0 at {address} did not answer"),
    ):
        client.pull(fence_of(client), None, whole(PLAN))
    assert heard
    assert address in heard[0]


def test_arrays_that_are_no_arenas_are_refused_before_they_are_sent(client: ShardClient) -> None:
    wrong = whole(PLAN)
    wrong["float32.trainable"] = wrong["float32.trainable"][:-1]
    with pytest.raises(InvalidArgument, match=r"announces 380 bytes of arena float32\.trainable"):
        client.push(fence_of(client), leased("worker-1", FIRST, 1, 0, part(PLAN, wrong)))
