"""A shard and sums of several micro-batches of a round: all of them count in it, once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pserver.core.requests import PullRequest, PushRequest, PushResult, SummedBatch
from pserver.engine.engine import ShardEngine
from pserver.transport.shard_memory import Shared
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Begin
from psrpc.core.errors import InvalidArgument, NotReady, ResourceExhausted
from psrpc.core.policy import Policy
from tests.pserver.bare_engine import (
    BACKUPS,
    WAIT_S,
    A,
    B,
    C,
    D,
    a_push,
    decision,
    fence,
    here,
    push,
    shard_of,
    value,
)
from tests.pserver.engine.test_rounds_ahead import ahead, version
from tests.pserver.engine.test_sums import applied

FOUR = Policy(mode="sync", replicas=4)
SMALL = BatchId(0, 30, 2)
"""Fewer records than others have."""


def a_sum(*batches: BatchId, base: int = 0) -> PushRequest:
    """Of ``batches``, held by the first, with totals."""
    first, *others = batches
    summed = tuple(SummedBatch(Attempt(batch, 1), (2.0, batch.count)) for batch in others)
    return replace(a_push(first, base=base), totals=(1.0, first.count), summed=summed)


def push_sum(engine: ShardEngine, *batches: BatchId, value: float, base: int = 0) -> PushResult:
    return engine.push(a_sum(*batches, base=base), here(value), 0)


def test_all_micro_batches_of_a_sum_are_staged_and_named_and_count_in_their_round() -> None:
    engine = shard_of(FOUR)
    assert push_sum(engine, B, A, value=2.0) == PushResult("staged", 0)
    assert engine.report().counters.staged == 2
    push(engine, C, value=5.0)
    assert engine.report().staged_now == 3
    engine.commands.decide(decision((A, 1), (B, 1), (C, 1)))
    # A mean of 2, 2 and 5.
    assert value(engine) == pytest.approx(-3.0)
    assert applied(engine) == [(0, 30)]
    (totals,) = engine.totals()
    assert totals.totals == (3.0, 20.0)
    counters = engine.report().counters
    assert (counters.applied, counters.staleness[0]) == (3, 3)
    assert engine.report().staged_now == 0


def test_a_sum_has_the_weight_of_all_its_records() -> None:
    engine = shard_of(FOUR)
    push_sum(engine, A, SMALL, value=1.0)
    push(engine, C, value=12.0)
    engine.commands.decide(decision((A, 1), (SMALL, 1), (C, 1)))
    assert value(engine) == pytest.approx(-(12 * 1.0 + 10 * 12.0) / 22)


def test_a_repeated_sum_changes_nothing() -> None:
    engine = shard_of(FOUR)
    for _ in range(2):
        assert push_sum(engine, A, B, value=2.0).outcome == "staged"
    # Nor does a micro-batch of it by itself, which says that another shard wants it so.
    assert push(engine, B, value=9.0).outcome == "staged"
    result = engine.push(a_push(A, skipped=True), Shared([]), 0)
    assert (result.outcome, result.skipped) == ("staged", False)
    assert engine.report().counters.staged == 2
    engine.commands.decide(decision((A, 1), (B, 1)))
    assert value(engine) == -2.0
    assert push_sum(engine, A, B, value=2.0, base=0).outcome == "already_applied"
    assert value(engine) == -2.0


def test_a_sum_of_which_a_micro_batch_is_staged_by_itself_is_refused() -> None:
    engine = shard_of(FOUR)
    push(engine, A, value=1.0)
    assert push_sum(engine, A, B, value=2.0).outcome == "one_by_one"
    assert engine.report().staged_now == 1
    push(engine, B, value=3.0)
    # Now it has all of them.
    assert push_sum(engine, A, B, value=2.0).outcome == "staged"
    engine.commands.decide(decision((A, 1), (B, 1)))
    assert value(engine) == -2.0


def test_a_sum_of_which_a_micro_batch_was_applied_before_is_refused() -> None:
    engine = shard_of(Policy())
    push(engine, A)
    engine.commands.begin(Begin(2, 2, keep=True, settings=FOUR))
    request = replace(a_sum(A, B, base=1), fence=fence(2, 2))
    assert engine.push(request, here(2.0), 0).outcome == "one_by_one"
    assert engine.report().staged_now == 0


def test_a_sum_is_not_in_a_round_without_all_its_micro_batches() -> None:
    engine = shard_of(FOUR)
    push_sum(engine, A, B, value=2.0)
    push(engine, C)
    with pytest.raises(NotReady, match="does not hold attempt 1 of epoch 1 positions 0"):
        engine.commands.decide(decision((A, 1), (C, 1)))
    assert (version(engine), applied(engine)) == (0, [])


def test_a_round_decided_ahead_needs_all_of_a_sum_on_all_shards() -> None:
    engine = shard_of(FOUR)
    engine.commands.plan(ahead(decision((A, 1), (B, 1), (C, 1), (D, 1))))
    push_sum(engine, A, B, value=2.0)
    assert version(engine) == 0
    push_sum(engine, C, D, value=4.0)
    assert (version(engine), value(engine)) == (1, -3.0)


def test_a_refused_sum_is_answered_at_once_where_its_pull_would_wait() -> None:
    engine = shard_of(FOUR)
    push(engine, A)
    pull = PullRequest(fence(), "w", 1)
    result, values = engine.push_round(a_sum(A, B), here(2.0), WAIT_S, pull, None)
    assert result.outcome == "one_by_one"
    assert values is not None
    assert values.version == 0


def test_no_more_are_staged_than_a_round_has() -> None:
    engine = shard_of(Policy(mode="sync", replicas=3))
    push_sum(engine, A, B, value=1.0)
    with pytest.raises(ResourceExhausted, match="holds 3 micro-batches already"):
        push_sum(engine, C, D, value=1.0)
    assert engine.report().staged_now == 2


def test_memory_of_a_sum_is_given_back_once() -> None:
    engine = shard_of(FOUR)
    push_sum(engine, A, B, value=1.0)
    pool = engine._intake.pool
    assert pool.in_use == 1
    engine._rounds.drop(Attempt(B, 1))
    assert (pool.in_use, engine.report().staged_now) == (0, 0)
    push_sum(engine, A, B, value=1.0)
    engine.commands.decide(decision((A, 1), (B, 1)))
    assert pool.in_use == 0


def test_backup_workers_push_no_sums() -> None:
    with pytest.raises(InvalidArgument, match="of finite gradients in sync mode without backup"):
        push_sum(shard_of(BACKUPS), A, B, value=1.0)
