"""Where a shard stands: the engine under orders to begin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pserver.core.requests import Begun, InitializeRequest, PullRequest, PushResult
from pserver.engine.engine import ShardEngine
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.core.commands import Begin, SnapshotOrder
from psrpc.core.errors import (
    CheckpointError,
    NotReady,
    RoundPassed,
    StaleGeneration,
)
from tests.pserver.bare_engine import (
    PLAN,
    A,
    B,
    C,
    a_push,
    checkpoint,
    decision,
    fence,
    here,
    initialized,
    values,
)
from tests.pserver.shards import (
    MOMENTUM,
    SGD,
    Sink,
    engine_of,
    identity_of,
)

KEPT = SnapshotOrder("step-0", write=False, keep=True, directory="", global_step=0)


def begun(generation: int, version: int, *intervals: list[int], held: bool = True) -> Begun:
    found = [{"epoch": 0, "applied": list(intervals), "skipped": []}] if intervals else []
    return Begun(generation, version, held, tuple(found))  # type: ignore[arg-type]


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def shard(sink: Sink) -> ShardEngine:
    """Async, of generation 1, with values of 0."""
    return initialized(engine_of(PLAN, sink=sink))


@pytest.fixture
def rounds(sink: Sink) -> ShardEngine:
    """The same in sync mode, with two micro-batches in a round."""
    return initialized(engine_of(PLAN, replicas=2, sink=sink))


# -- the three sources -----------------------------------------------------------------------


def test_before_its_first_order_a_shard_refuses_everything() -> None:
    identity = replace(identity_of(), generation=0, policy=0)
    engine = ShardEngine(identity, PLAN, NumpyEngine(SGD, PLAN, 0), Sink())
    nothing = replace(fence(0), policy=0)
    with pytest.raises(StaleGeneration, match="has not begun yet"):
        engine.initialize(InitializeRequest(nothing, ()), here(0), 0)
    with pytest.raises(StaleGeneration, match="has not begun yet"):
        engine.pull(PullRequest(nothing, "w", None), 0)
    with pytest.raises(StaleGeneration, match="has not begun yet"):
        engine.push(a_push(), here(1), 0)
    assert engine.report().waiting_for == "the coordinator to say where to begin"
    assert engine.commands.begin(Begin(1, 1)) == begun(1, 0, held=False)
    initialized(engine)
    assert engine.push(a_push(), here(1), 0).outcome == "applied"


def test_kept_parameters_go_on_with_what_they_have_seen(shard: ShardEngine) -> None:
    shard.push(a_push(A), here(1), 0)
    reader = shard.pull(PullRequest(fence(), "w", None), 0)
    assert shard.commands.begin(Begin(5, 1, keep=True)) == begun(5, 1, [0, 10])
    assert values(shard, 5) == [-1]
    assert reader.generation == 1
    assert shard.push(a_push(A, 9, generation=5), here(1), 0) == PushResult("already_applied", 1)
    assert shard.push(a_push(B, 9, generation=5), here(1), 0) == PushResult("applied", 2, 1)


def test_a_restored_shard_has_the_state_of_the_checkpoint_and_no_other(shard: ShardEngine) -> None:
    shard.push(a_push(A), here(1), 0)
    shard.push(a_push(B), here(1), 0)
    order = Begin(2, 1, restore="checkpoints/step-1")
    assert shard.commands.begin(order, checkpoint(7, 1, C)) == begun(2, 1, [20, 30])
    assert values(shard, 2) == [7]
    assert shard.push(a_push(C, generation=2), here(1), 0).outcome == "already_applied"
    assert shard.push(a_push(A, generation=2), here(1), 0) == PushResult("applied", 2, 1)
    assert values(shard, 2) == [6]


def test_a_shard_that_begins_afresh_waits_for_a_worker(shard: ShardEngine) -> None:
    shard.push(a_push(A), here(1), 0)
    assert shard.commands.begin(Begin(2, 1)) == begun(2, 0, held=False)
    with pytest.raises(NotReady, match="waits for a worker to initialize it"):
        values(shard, 2)
    initialized(shard, 2)
    assert shard.push(a_push(A, generation=2), here(1), 0) == PushResult("applied", 1, 0)


def test_slots_of_another_optimizer_leave_no_parameters_behind() -> None:
    engine = initialized(engine_of(PLAN, optimizer=MOMENTUM))
    engine.push(a_push(A), here(1), 0)
    order = Begin(2, 1, restore="checkpoints/step-1")
    for _ in range(2):  # a repetition is no success either
        with pytest.raises(CheckpointError, match="SGD"):
            engine.commands.begin(order, checkpoint(7, 1, C))
        report = engine.report()
        assert (report.generation, report.initialized) == (2, False)
    with pytest.raises(NotReady):
        values(engine, 2)
    assert engine.commands.begin(Begin(3, 1)) == begun(3, 0, held=False)


# -- orders that come again or late ----------------------------------------------------------


def test_an_order_that_was_carried_out_changes_nothing(shard: ShardEngine, sink: Sink) -> None:
    order = Begin(2, 1, restore="checkpoints/step-1")
    shard.commands.begin(order, checkpoint(7, 0))
    shard.push(a_push(A, generation=2), here(1), 0)
    shard.commands.take_snapshot(KEPT)
    assert shard.commands.begin(order, checkpoint(7, 0)) == begun(2, 1, [0, 10])
    assert values(shard, 2) == [6]
    assert shard.pull(PullRequest(fence(2), "w", "step-0"), 0).version == 1
    assert sink.generations == [2]


def test_an_older_order_changes_nothing_and_is_not_answered(shard: ShardEngine) -> None:
    shard.commands.begin(Begin(3, 1, keep=True))
    assert shard.commands.begin(Begin(2, 1)) is None
    assert values(shard, 3) == [0]


# -- what of before is gone ------------------------------------------------------------------


def test_staged_gradients_are_dropped_and_their_memory_is_free(rounds: ShardEngine) -> None:
    for batch in (A, B):
        for attempt in (1, 2):
            rounds.push(a_push(batch, attempt), here(1), 0)
    rounds.commands.begin(Begin(2, 1, keep=True))
    assert rounds.report().staged_now == 0
    # The pool has six sets; all of them can be had again, two of them at the same time.
    for number in range(4):
        for batch in (A, B):
            for attempt in (1, 2):
                rounds.push(a_push(batch, attempt, generation=2 + number), here(1), 0)
        rounds.commands.begin(Begin(3 + number, 1, keep=True))
    with pytest.raises(NotReady, match="does not hold attempt 1"):
        rounds.commands.decide(decision((A, 1), generation=6))


def test_snapshots_and_names_of_orders_are_forgotten(shard: ShardEngine, sink: Sink) -> None:
    shard.commands.take_snapshot(KEPT)
    shard.push(a_push(A), here(1), 0)
    shard.commands.begin(Begin(2, 1, keep=True))
    with pytest.raises(RoundPassed, match="kept are: none"):
        shard.pull(PullRequest(fence(2), "w", "step-0"), 0)
    shard.commands.take_snapshot(KEPT)
    assert sink.repeats == []
    assert sink.snapshots["step-0"].values.version == 1
    assert sink.snapshots["step-0"].values.generation == 2


# -- decisions that a shard is behind with ---------------------------------------------------


def test_a_shard_that_is_behind_applies_the_decision_first(rounds: ShardEngine, sink: Sink) -> None:
    rounds.push(a_push(A, 4), here(1), 0)
    rounds.push(a_push(B, 5), here(3), 0)
    late = replace(decision((A, 4), (B, 5)), snapshots=(KEPT,))
    assert rounds.commands.begin(Begin(2, 1, keep=True, decision=late)) == begun(2, 1, [0, 20])
    assert values(rounds, 2) == [-2]
    assert not sink.snapshots, "of a generation that is over"


def test_a_decision_that_was_applied_is_not_applied_again(rounds: ShardEngine) -> None:
    rounds.push(a_push(A, 4), here(1), 0)
    rounds.commands.decide(decision((A, 4)))
    order = Begin(2, 1, keep=True, decision=decision((A, 4)))
    assert rounds.commands.begin(order) == begun(2, 1, [0, 10])
    rounds.push(a_push(B, 4, generation=2, base=1), here(1), 0)
    order = Begin(3, 1, keep=True, decision=decision((A, 4)))
    assert rounds.commands.begin(order) == begun(3, 1, [0, 10]), (
        "of an older generation than the shard's"
    )


def test_a_decision_that_cannot_be_applied_leaves_all_as_it_was(rounds: ShardEngine) -> None:
    rounds.push(a_push(A, 4), here(1), 0)
    order = Begin(2, 1, keep=True, decision=decision((A, 4), (B, 5)))
    with pytest.raises(NotReady, match="does not hold attempt 5"):
        rounds.commands.begin(order)
    assert values(rounds, 1) == [0]
    rounds.commands.decide(decision((A, 4)))
    assert values(rounds, 1) == [-1]
