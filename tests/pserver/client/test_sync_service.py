"""A shard of a sync job over real gRPC: staging, rounds and the bits of the mean."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pserver.client.client import RetryPolicy, ShardClient, StagedEverywhere
from pserver.engine.engine import ShardEngine
from pserver.engine.gate import RoundWaits
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, RoundsAhead
from psrpc.core.errors import (
    AccessDenied,
    InvalidArgument,
    NotReady,
    ResourceExhausted,
    RoundPassed,
    StaleGeneration,
)
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import from_decision, to_batch
from tests.pserver.shards import (
    INCARNATION,
    INITIAL,
    ONE_TRY,
    WITH_OWN,
    NDArray,
    Sink,
    counting,
    engine_of,
    fence_of,
    leased,
    part,
    plan_of,
    served,
    signed,
    whole,
)

PLAN = plan_of()
A, B, C = BatchId(0, 0, 10), BatchId(0, 10, 10), BatchId(0, 20, 7)


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def engine(sink: Sink) -> ShardEngine:
    return engine_of(PLAN, replicas=3, sink=sink)


@pytest.fixture(params=WITH_OWN)
def client(request: pytest.FixtureRequest, engine: ShardEngine) -> Iterator[ShardClient]:
    with served(engine, transport=request.param) as client:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        yield client


def gradient(seed: int) -> dict[str, NDArray]:
    rng = np.random.default_rng(seed)
    arrays = whole(PLAN)
    for array in arrays.values():
        array[:] = rng.normal(size=len(array))
    return arrays


def stage(
    client: ShardClient,
    batch: BatchId,
    attempt: int,
    gradients: dict[str, NDArray] | None,
    base: int = 0,
) -> str:
    push = leased(
        "worker-1", batch, attempt, base, None if gradients is None else part(PLAN, gradients)
    )
    return client.push(fence_of(client), push).outcome


def decision(
    *attempts: tuple[BatchId, int], number: int = 0, snapshots: tuple[str, ...] = ()
) -> types.Decision:
    return types.Decision(
        generation=1,
        round=number,
        attempts=[types.Attempt(batch=to_batch(b), attempt=a) for b, a in attempts],
        snapshots=[types.SnapshotOrder(name=name, keep=True) for name in snapshots],
    )


def pulled(
    client: ShardClient, source: int | str | None = None, decided: types.Decision | None = None
) -> dict[str, NDArray]:
    into = whole(PLAN, -1.0)
    client.pull(fence_of(client), source, into, None if decided is None else signed(decided))
    return into


def applied_to(values: dict[str, NDArray], mean: dict[str, NDArray]) -> dict[str, NDArray]:
    """SGD with learning rate 1, and state that is added to."""
    return {
        "float32.trainable": values["float32.trainable"] - mean["float32.trainable"],
        "float32.state": values["float32.state"] + mean["float32.state"],
    }


def assert_same_bits(found: dict[str, NDArray], expected: dict[str, NDArray]) -> None:
    for name in expected:
        assert found[name].tobytes() == expected[name].tobytes(), name


def test_a_round_is_the_weighted_mean_of_what_was_named_in_batch_order(
    client: ShardClient,
) -> None:
    for batch, attempt, seed in ((C, 5, 3), (A, 1, 1), (B, 3, 2)):
        assert stage(client, batch, attempt, gradient(seed)) == "staged"
    found = pulled(client, 1, decision((C, 5), (A, 1), (B, 3)))
    mean = {}
    for name in found:
        total = np.float32(10 / 27) * gradient(1)[name]
        total += np.float32(10 / 27) * gradient(2)[name]
        total += np.float32(7 / 27) * gradient(3)[name]
        mean[name] = total
    assert_same_bits(found, applied_to(counting(PLAN), mean))


def test_of_two_attempts_the_named_one_counts(client: ShardClient, engine: ShardEngine) -> None:
    stage(client, A, 1, gradient(1))
    stage(client, A, 2, gradient(2))
    assert client.get_status().staged_now == 2
    found = pulled(client, 1, decision((A, 2)))
    assert_same_bits(found, applied_to(counting(PLAN), gradient(2)))
    status = client.get_status()
    assert (status.staged_now, status.applied, status.staged, status.version) == (0, 1, 2, 1)
    assert stage(client, A, 1, gradient(1)) == "already_applied"


def test_all_workers_may_die_and_leave_their_gradients_here(client: ShardClient) -> None:
    """Any of the first attempts may still be committed, so all second ones need room, too."""
    for attempt in (1, 2):
        for batch in (A, B, C):
            assert stage(client, batch, attempt, gradient(attempt)) == "staged"
    assert client.get_status().staged_now == 6
    pulled(client, 1, decision((A, 2), (B, 1), (C, 2)))
    assert client.get_status().staged_now == 0


def test_a_third_attempt_has_no_room(client: ShardClient) -> None:
    stage(client, A, 1, gradient(1))
    stage(client, A, 2, gradient(2))
    assert stage(client, A, 2, gradient(2)) == "staged", "the same attempt again"
    with pytest.raises(ResourceExhausted, match="attempts 1 and 2 are held"):
        stage(client, A, 3, gradient(3))


def test_a_round_has_room_for_its_micro_batches_only(client: ShardClient) -> None:
    for index in range(3):
        stage(client, BatchId(0, 10 * index, 10), index + 1, gradient(index))
    with pytest.raises(ResourceExhausted, match="holds 3 micro-batches already"):
        stage(client, BatchId(0, 30, 10), 4, gradient(4))
    status = client.get_status()
    assert (status.staged_now, status.refused) == (3, 1)


def test_micro_batches_that_overlap_are_refused(client: ShardClient) -> None:
    stage(client, A, 1, gradient(1))
    with pytest.raises(InvalidArgument, match="overlap"):
        stage(client, BatchId(0, 5, 10), 2, gradient(1))


def test_skipped_micro_batches_take_no_part_in_the_mean(client: ShardClient) -> None:
    stage(client, A, 1, None)
    stage(client, B, 2, gradient(2))
    found = pulled(client, 1, decision((A, 1), (B, 2)))
    assert_same_bits(found, applied_to(counting(PLAN), gradient(2)))
    status = client.get_status()
    assert (status.applied, status.skipped) == (1, 1)
    assert stage(client, A, 9, gradient(1)) == "already_applied"


def test_a_round_of_skipped_micro_batches_only_raises_the_version(client: ShardClient) -> None:
    stage(client, A, 1, None)
    into = whole(PLAN)
    info = client.pull(fence_of(client), 1, into, signed(decision((A, 1))))
    assert info.version == 1
    assert_same_bits(into, counting(PLAN))


def test_a_decision_counts_once(client: ShardClient, engine: ShardEngine) -> None:
    stage(client, A, 1, gradient(1))
    decided = decision((A, 1))
    first = pulled(client, 1, decided)
    engine.commands.decide(from_decision(decided))
    assert_same_bits(pulled(client, 1, decided), first)


def test_a_decision_waits_for_what_it_names(client: ShardClient) -> None:
    stage(client, A, 1, gradient(1))
    with pytest.raises(NotReady, match=r"does not hold attempt 7 of epoch 1 positions 10\.\.19"):
        pulled(client, 1, decision((A, 1), (B, 7)))
    with pytest.raises(NotReady, match="waits for the decision of round 0"):
        pulled(client, 3, decision((A, 1), number=2))
    assert_same_bits(pulled(client), counting(PLAN))


def test_a_decision_of_another_generation_is_refused(client: ShardClient) -> None:
    stage(client, A, 1, gradient(1))
    decided = decision((A, 1))
    decided.generation = 2
    with pytest.raises(StaleGeneration, match="generation 2; shard 0 is in 1"):
        pulled(client, 1, decided)


def test_a_pull_waits_for_its_round(client: ShardClient, engine: ShardEngine) -> None:
    stage(client, A, 1, gradient(1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pulled, client, 1)
        engine.commands.decide(from_decision(decision((A, 1))))
        assert_same_bits(waiting.result(30), applied_to(counting(PLAN), gradient(1)))


def test_a_wait_that_is_too_long_says_for_what(client: ShardClient) -> None:
    stage(client, A, 1, gradient(1))
    address = client.peer.rpartition(" ")[2]
    with (
        ShardClient(address, INCARNATION, PLAN, 0, retry=ONE_TRY, deadline_s=0.1) as hasty,
        pytest.raises(NotReady, match="decision of round 0; it holds 1 of 3 micro-batches"),
    ):
        pulled(hasty, 1)


def test_a_waiting_pull_is_let_go_when_the_shard_leaves(engine: ShardEngine) -> None:
    engine.close()
    with served(engine) as client:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        with pytest.raises(NotReady, match="round 0"):
            pulled(client, 1)


def test_a_shard_past_the_round_says_so(client: ShardClient) -> None:
    stage(client, A, 1, gradient(1))
    pulled(client, 1, decision((A, 1)))
    with pytest.raises(RoundPassed, match="round 0 was asked for; shard 0 is at round 1"):
        pulled(client, 0)
    with pytest.raises(RoundPassed, match="is for round 0; shard 0 is at round 1"):
        stage(client, B, 2, gradient(2))


def planned(*attempts: tuple[BatchId, int], number: int = 0) -> RoundsAhead:
    """One round that is decided ahead."""
    return RoundsAhead((from_decision(decision(*attempts, number=number)),))


def push_pull(
    client: ShardClient, batch: BatchId, attempt: int, seed: int, wanted: int
) -> tuple[str, int, dict[str, NDArray]]:
    """Its outcome, and the version and the values that came with it."""
    into = whole(PLAN, -1.0)
    push = leased("worker-1", batch, attempt, wanted - 1, part(PLAN, gradient(seed)))
    result, info = client.push_pull(fence_of(client), push, into, None, wanted)
    assert result.receipt
    return result.outcome, info.version, into


def test_a_push_that_completes_a_round_brings_the_next_one(
    client: ShardClient, engine: ShardEngine
) -> None:
    engine.commands.plan(planned((A, 1)))
    outcome, version, found = push_pull(client, A, 1, 1, wanted=1)
    assert (outcome, version) == ("staged", 1)
    assert_same_bits(found, applied_to(counting(PLAN), gradient(1)))
    # As after an answer that was lost.
    assert push_pull(client, A, 1, 1, wanted=1)[:2] == ("already_applied", 1)


def test_a_push_that_completes_a_round_waits_for_no_other_thread(
    client: ShardClient, engine: ShardEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(*_request: Any) -> None:
        raise AssertionError("the lock was given away before the values were read")

    monkeypatch.setattr(RoundWaits, "reached", waits)
    engine.commands.plan(planned((A, 1)))
    assert push_pull(client, A, 1, 1, wanted=1)[:2] == ("staged", 1)


def test_a_pull_with_a_push_waits_for_the_other_micro_batches(
    client: ShardClient, engine: ShardEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.commands.plan(planned((A, 1), (B, 2)))
    begun, reached = threading.Event(), RoundWaits.reached

    def waits(*request: Any) -> None:
        begun.set()
        reached(*request)

    monkeypatch.setattr(RoundWaits, "reached", waits)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(push_pull, client, A, 1, 1, 1)
        assert begun.wait(30)
        assert engine.report().staged_now == 1
        address = client.peer.rpartition(" ")[2]
        with ShardClient(address, INCARNATION, PLAN, 0, retry=ONE_TRY) as other:
            assert stage(other, B, 2, gradient(2)) == "staged"
        outcome, version, found = waiting.result(30)
    assert (outcome, version) == ("staged", 1)
    mean = {
        name: np.float32(0.5) * gradient(1)[name] + np.float32(0.5) * gradient(2)[name]
        for name in found
    }
    assert_same_bits(found, applied_to(counting(PLAN), mean))


def test_a_push_stays_staged_when_its_pull_has_waited_too_long(
    client: ShardClient, engine: ShardEngine
) -> None:
    engine.commands.plan(planned((A, 1), (B, 2)))
    address = client.peer.rpartition(" ")[2]
    with (
        ShardClient(address, INCARNATION, PLAN, 0, retry=ONE_TRY, deadline_s=0.25) as hasty,
        pytest.raises(NotReady, match="decision of round 0; it holds 1 of 3 micro-batches"),
    ):
        push_pull(hasty, A, 1, 1, wanted=1)
    assert stage(client, B, 2, gradient(2)) == "staged"
    assert push_pull(client, A, 1, 1, wanted=1)[:2] == ("already_applied", 1)


def test_a_confirmation_is_taken_and_a_wrong_one_denied(
    client: ShardClient, engine: ShardEngine
) -> None:
    push = leased("worker-1", A, 1, 0, part(PLAN, gradient(1)))
    receipt = client.push(fence_of(client), push).receipt
    client.confirm(fence_of(client), [StagedEverywhere(Attempt(A, 1), (receipt,))])
    with pytest.raises(AccessDenied, match="shard 0 has not vouched for it"):
        client.confirm(fence_of(client), [StagedEverywhere(Attempt(A, 2), (receipt,))])
    assert engine.report().version == 0


def test_a_sync_job_has_no_newest_values_with_a_push(client: ShardClient) -> None:
    push = leased("worker-1", A, 1, 0, part(PLAN, gradient(1)))
    with pytest.raises(
        InvalidArgument, match="the newest values were asked for with a push of a sync job"
    ):
        client.push_pull(fence_of(client), push, whole(PLAN))


def test_snapshots_of_a_decision_show_the_round_it_made(client: ShardClient, sink: Sink) -> None:
    stage(client, A, 1, gradient(1))
    decided = decision((A, 1), snapshots=("step-1",))
    after = pulled(client, 1, decided)
    stage(client, B, 2, gradient(2), base=1)
    pulled(client, 2, decision((B, 2), number=1))
    assert_same_bits(pulled(client, "step-1"), after)
    pulled(client, 2, decided)
    assert list(sink.snapshots) == ["step-1"]
    snapshot = sink.snapshots["step-1"]
    assert snapshot.values.version == 1
    assert snapshot.applied == ({"epoch": 0, "applied": [[0, 10]], "skipped": []},)
    assert snapshot.slots.iterations == 1


def test_at_most_three_snapshots_are_kept(
    client: ShardClient, engine: ShardEngine, sink: Sink
) -> None:
    names = [f"step-{step}" for step in range(4)]
    stage(client, A, 1, gradient(1))
    pulled(client, 1, decision((A, 1), snapshots=tuple(names)))
    assert list(sink.snapshots) == names[:3]
    assert "expected at most 3" in sink.failures["step-3"]
    engine.commands.release_snapshot("step-0")
    with pytest.raises(RoundPassed, match="kept are: step-1, step-2"):
        pulled(client, "step-0")


def test_a_retry_waits_for_a_shard_that_is_not_ready(engine: ShardEngine) -> None:
    heard: list[str] = []
    retry = RetryPolicy(first_s=0.001, longest_s=0.001, budget_s=30)
    with served(engine, retry) as client:
        fence = fence_of(client)
        with ShardClient(
            client.peer.rpartition(" ")[2], 77, PLAN, 0, retry=retry, announce=heard.append
        ) as other:

            def initialize_then_go_on(reason: str) -> None:
                heard.append(reason)
                other.initialize(fence, counting(PLAN), INITIAL)

            client._tries.announce = initialize_then_go_on
            assert_same_bits(pulled(client), counting(PLAN))
    assert "waits for a worker to initialize it" in heard[0]
