"""A shard and pushes of the sum of several batches' gradients: all of them count once, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pserver.core.requests import PushRequest, PushResult, SummedBatch
from pserver.engine.engine import ShardEngine
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Begin
from psrpc.core.errors import AccessDenied, InvalidArgument, StaleGeneration
from psrpc.core.policy import Policy
from psrpc.security.signatures import receipt_of
from tests.pserver.bare_engine import A, B, C, a_push, here, push, shard_of, value
from tests.pserver.shards import (
    AUTHORITY,
    INITIAL,
    TRANSPORTS,
    Transport,
    counting,
    engine_of,
    fence_of,
    grant_of,
    leased,
    part,
    plan_of,
    served,
    whole,
)

SSP = Policy(mode="ssp", staleness=1)


def a_sum(*others: BatchId, **options: Any) -> PushRequest:
    """Of batch A and ``others``, with totals."""
    summed = tuple(SummedBatch(Attempt(batch, 1), (2.0, batch.count)) for batch in others)
    return replace(a_push(A, **options), totals=(1.0, 10.0), summed=summed)


def push_sum(engine: ShardEngine, *others: BatchId, **options: Any) -> PushResult:
    return engine.push(a_sum(*others, **options), here(3.0), 0)


def applied(engine: ShardEngine) -> list[tuple[int, int]]:
    epochs = engine.applied().to_epochs()
    return [(start, stop) for epoch in epochs for start, stop in epoch["applied"]]


def test_all_batches_of_a_sum_count_in_one_update() -> None:
    engine = shard_of(Policy())
    assert push_sum(engine, C) == PushResult("applied", 1, 0)
    assert (value(engine), applied(engine)) == (-3.0, [(0, 10), (20, 30)])
    (totals,) = engine.totals()
    assert (totals.records, totals.totals) == (20, (3.0, 20.0))
    counters = engine.report().counters
    assert (counters.applied, counters.staleness[0]) == (2, 2)


def test_a_repeated_sum_changes_nothing() -> None:
    engine = shard_of(Policy())
    push_sum(engine, B)
    assert push_sum(engine, B) == PushResult("already_applied", 1)
    # Nor does each batch by itself, which another worker may have been leased.
    assert push(engine, B, attempt=2).outcome == "already_applied"
    assert value(engine) == -3.0


@pytest.mark.parametrize("had", [A, B])
def test_a_sum_of_which_the_shard_had_a_batch_changes_nothing(had: BatchId) -> None:
    engine = shard_of(Policy())
    push(engine, had)
    assert push_sum(engine, B) == PushResult("one_by_one", 1)
    assert (value(engine), len(applied(engine))) == (-1.0, 1)
    assert [push(engine, batch).outcome for batch in (A, B)].count("applied") == 1
    assert value(engine) == -2.0


def test_a_sum_too_stale_changes_nothing() -> None:
    engine = shard_of(Policy(max_staleness=0))
    push(engine, C)
    assert push_sum(engine, B) == PushResult("too_stale", 1, 1)
    assert applied(engine) == [(20, 30)]
    assert engine.report().counters.too_stale == 2
    # None of them is older than the other.
    assert push_sum(engine, B, base=1).outcome == "applied"


def test_gradients_that_are_compensated_for_their_delay_come_one_by_one() -> None:
    engine = shard_of(Policy(delay_compensation="constant"))
    assert push_sum(engine, B).outcome == "one_by_one"
    assert (value(engine), applied(engine)) == (0.0, [])


def no_sum(**changes: Any) -> Callable[[], PushRequest]:
    return lambda: replace(a_sum(B), **changes)


@pytest.mark.parametrize(
    ("request_of", "why"),
    [
        (no_sum(skipped=True, extents=(), totals=()), "expected one, except of finite"),
        (lambda: a_sum(A), "sums a record twice"),
        (lambda: a_sum(B, BatchId(0, 15, 10)), "sums a record twice"),
        (lambda: a_sum(*[BatchId(1, n, 1) for n in range(64)]), "sums 65 batches; expected at mos"),
        (no_sum(summed=(SummedBatch(Attempt(B, 1), (1.0,)),)), "has 1 totals"),
    ],
    ids=["skipped", "twice", "overlapping", "too many", "totals"],
)
def test_what_is_no_sum_is_refused(request_of: Callable[[], PushRequest], why: str) -> None:
    engine = shard_of(Policy())
    with pytest.raises(InvalidArgument, match=why):
        engine.push(request_of(), here(3.0), 0)
    assert applied(engine) == []


def test_ssp_takes_no_sums() -> None:
    engine = shard_of(SSP)
    with pytest.raises(InvalidArgument, match="expected one, except of finite"):
        push_sum(engine, B)
    # But a worker that does not know of the change yet gets to know it.
    engine = shard_of(Policy())
    engine.commands.begin(Begin(2, 2, keep=True, settings=SSP))
    with pytest.raises(StaleGeneration):
        push_sum(engine, B)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sum_needs_the_grant_of_each_batch_and_brings_a_receipt_for_each(
    transport: Transport,
) -> None:
    plan = plan_of()
    engine = engine_of(plan)
    first = leased("worker-1", A, 1, 0, part(plan, whole(plan, 1.0)))

    def summed(worker: str) -> tuple[SummedBatch, ...]:
        return (SummedBatch(Attempt(B, 7), (), grant_of(worker, B, 7)),)

    with served(engine, transport=transport) as client:
        fence = fence_of(client)
        client.initialize(fence, counting(plan), INITIAL)
        with pytest.raises(AccessDenied):
            client.push(fence, replace(first, summed=summed("worker-2")))
        assert applied(engine) == []
        for outcome in ("applied", "already_applied"):
            result = client.push(fence, replace(first, summed=summed("worker-1")))
            assert result.outcome == outcome
            key = AUTHORITY.keys.grant
            assert result.receipt == receipt_of(key, "worker-1", 1, A, 1, 0, False)
            expected = receipt_of(key, "worker-1", 1, B, 7, 0, False)
            assert result.summed_receipts == (expected,)
        skipped = leased("worker-1", C, 1, 0, None)
        client.push(fence, skipped)
        both = replace(first, summed=(SummedBatch(Attempt(C, 1), (), skipped.grant),))
        # The receipt says that this shard has no gradient of it.
        expected = receipt_of(key, "worker-1", 1, C, 1, 0, True)
        assert client.push(fence, both).summed_receipts == (expected,)
