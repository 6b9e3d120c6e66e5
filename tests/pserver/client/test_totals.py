"""Totals of training: what a batch adds to them counts when its gradient does, and once."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pserver.core.applied import AppliedSet
from pserver.engine.engine import ShardEngine
from pserver.transport.shard_memory import Shared
from psrpc.checkpoint.load import common_applied
from psrpc.checkpoint.shard_file import ShardState, write_shard_file
from psrpc.checkpoint.shard_reader import ShardReader
from psrpc.core.batch import KEPT_VALUES, BatchId
from psrpc.core.commands import Attempt, Begin, Revocation
from psrpc.core.errors import InvalidArgument, StaleGeneration
from psrpc.core.policy import ASYNC
from psrpc.core.shard_reports import EpochTotals, HeldState
from psrpc.wire.shard_reports import to_ready
from tests.pserver.bare_engine import (
    ARENA,
    BACKUPS,
    PLAN,
    ROUNDS,
    WAIT_S,
    A,
    B,
    C,
    a_push,
    checkpoint,
    decision,
    filled,
    here,
    shard_of,
)


def push(engine: ShardEngine, batch: BatchId, *totals: float, **options: Any) -> str:
    request = replace(a_push(batch, **options), totals=totals)
    return engine.push(request, here(1.0), WAIT_S).outcome


def totals(engine: ShardEngine) -> dict[int, tuple[float, ...]]:
    return {epoch: found for epoch, _, found in engine.totals()}


def test_a_push_that_is_repeated_counts_once() -> None:
    engine = shard_of(ASYNC)
    assert push(engine, A, 20.0, 10.0, 7.0) == "applied"
    assert push(engine, A, 20.0, 10.0, 7.0) == "already_applied"
    assert push(engine, A, 99.0, 10.0, 9.0, attempt=2) == "already_applied"
    assert push(engine, B, 5.0, 10.0, 1.0, base=1) == "applied"
    assert engine.totals() == [EpochTotals(0, 20, (25.0, 20.0, 8.0))]


def test_a_push_that_is_refused_does_not_count() -> None:
    engine = shard_of(replace(ASYNC, max_staleness=0))
    engine.commands.revoke(Revocation(1, "gone"))
    with pytest.raises(StaleGeneration):
        engine.push(replace(a_push(A, worker="gone"), totals=(1.0, 10.0)), here(1), WAIT_S)
    push(engine, B, 2.0, 10.0)
    assert push(engine, C, 3.0, 10.0) == "too_stale"
    assert totals(engine) == {0: (2.0, 10.0)}


@pytest.mark.parametrize("policy", [ROUNDS, BACKUPS])
def test_of_a_round_the_attempts_that_were_decided_count(policy: object) -> None:
    engine = shard_of(policy)  # type: ignore[arg-type]
    push(engine, A, 1.0, 10.0, attempt=1)
    push(engine, A, 2.0, 10.0, attempt=2)
    push(engine, B, 4.0, 10.0, attempt=3)
    assert totals(engine) == {}
    engine.commands.decide(decision((A, 2), (B, 3)))
    engine.commands.decide(decision((A, 2), (B, 3)))
    assert totals(engine) == {0: (6.0, 20.0)}


def test_batches_applied_before_the_rounds_are_not_counted_again() -> None:
    engine = shard_of(ASYNC)
    push(engine, A, 1.0, 10.0)
    engine.commands.begin(Begin(2, 2, keep=True, settings=ROUNDS))
    push(engine, B, 4.0, 10.0, generation=2, policy=2, attempt=8, base=1)
    engine.commands.decide(decision((A, 7), (B, 8), number=1, generation=2))
    assert totals(engine) == {0: (5.0, 20.0)}


def test_a_checkpoint_has_the_totals_of_its_batches_and_no_others() -> None:
    engine = shard_of(ASYNC)
    push(engine, A, 1.0, 10.0)
    saved = engine.applied()
    push(engine, B, 2.0, 10.0, base=1)
    restored = replace(checkpoint(1.0, 1, A), applied=saved)
    begun = engine.commands.begin(Begin(2, 1, restore="checkpoints/x"), restored)
    assert begun is not None
    assert [list(one.totals) for one in to_ready(0, HeldState(1), begun.applied).applied] == [
        [1.0, 10.0]
    ]
    push(engine, B, 4.0, 10.0, generation=2, base=1)
    assert totals(engine) == {0: (5.0, 20.0)}


def test_they_are_kept_in_a_shards_file(tmp_path: Path) -> None:
    applied = AppliedSet()
    applied.add(A, totals=(0.1 + 0.2, 10.0))
    applied.add(B, skipped=True)
    state = ShardState({ARENA: filled(1.0)}, applied=applied.to_epochs())
    path = tmp_path / "shard.safetensors"
    written = write_shard_file(path, PLAN, 0, state, run_id="r", generation=1, global_step=1)
    with ShardReader(path, written.nbytes, written.sha256) as reader:
        assert AppliedSet.from_epochs(reader.header.applied) == applied


def test_resumed_on_other_shards_the_first_ones_go_on() -> None:
    first, second = AppliedSet(), AppliedSet()
    first.add(A, totals=(1.0, 10.0))
    first.add(B, totals=(2.0, 10.0))
    second.add(A)
    common = common_applied([first.to_epochs(), second.to_epochs()])
    assert common == ({"epoch": 0, "applied": [[0, 10]], "skipped": [], "totals": [3.0, 20.0]},)


def test_of_other_metrics_only_the_loss_is_added() -> None:
    applied = AppliedSet()
    applied.add(A, totals=(1.0, 10.0, 5.0))
    applied.add(B, totals=(2.0, 10.0))
    applied.add(C, totals=(4.0, 10.0, 5.0))
    assert applied.newest_totals() == [EpochTotals(0, 30, (7.0, 30.0))]


@pytest.mark.parametrize("last", [BatchId(0, 40, 20), BatchId(0, 90, 10)])
def test_a_reader_without_the_lock_sees_one_moment(last: BatchId) -> None:
    """Whichever two of the reader's calls another thread gets its turn between."""
    for turn in itertools.count():
        applied = AppliedSet()
        for first in (0, 60):
            applied.add(BatchId(0, first, 20), totals=(1.0, 20.0))
        calls = itertools.count()

        def meanwhile(
            *_event: object,
            applied: AppliedSet = applied,
            calls: Iterator[int] = calls,
            turn: int = turn,
        ) -> None:
            if next(calls) == turn:
                applied.add(last, totals=(1.0, float(last.count)))

        sys.setprofile(meanwhile)
        try:
            (found,) = applied.newest_totals()
        finally:
            sys.setprofile(None)
        assert found.records == found.totals[1]
        if next(calls) <= turn:
            break
    assert turn > 2


def test_totals_of_old_epochs_are_let_go() -> None:
    applied = AppliedSet()
    for epoch in range(40):
        applied.add(BatchId(epoch, 0, 1), totals=[1.0] * 1000)
    kept = [one for one in applied.to_epochs() if "totals" in one]
    assert sum(len(one["totals"]) for one in kept) <= KEPT_VALUES
    assert [one["epoch"] for one in kept] == list(range(24, 40))
    assert [one.epoch for one in applied.newest_totals()] == list(range(36, 40))


@pytest.mark.parametrize("bad", [(1.0,), (float("nan"), 10.0), (1.0,) * 1025])
def test_totals_that_are_none_are_refused(bad: tuple[float, ...]) -> None:
    engine = shard_of(ASYNC)
    with pytest.raises(InvalidArgument, match="2 to 1024 finite numbers"):
        push(engine, A, *bad)
    skipped = replace(a_push(A, skipped=True), totals=(1.0, 10.0))
    with pytest.raises(InvalidArgument, match=r"a skipped push of .* has totals"):
        engine.push(skipped, Shared([]), WAIT_S)
    assert totals(engine) == {}


def test_an_attempt_is_named_in_the_order_of_its_batch() -> None:
    """The decision's order is not what the staged totals go by."""
    engine = shard_of(ROUNDS)
    push(engine, A, 1.0, 10.0, attempt=5)
    engine.push(a_push(B, attempt=4, skipped=True), Shared([]), WAIT_S)
    engine.commands.decide(decision((B, 4), (A, 5)))
    assert engine.applied().to_epochs() == [
        {"epoch": 0, "applied": [[0, 20]], "skipped": [[10, 20]], "totals": [1.0, 10.0]}
    ]
    assert Attempt(A, 5) < Attempt(B, 4)
