"""Where a shard stands: the engine under orders to begin, and what of before reaches it then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Any

import numpy as np
import pytest

from pserver.applied import AppliedSet
from pserver.arrival import Shared
from pserver.assembly import Extent, shard_extents
from pserver.engine import ShardEngine
from pserver.fence import Fence
from pserver.requests import (
    Begin,
    Begun,
    Decision,
    InitializeRequest,
    PullRequest,
    PushRequest,
    PushResult,
    Restored,
    Revocation,
    SnapshotOrder,
)
from pserver.staging import Attempt
from pserver.updates.engine import Slots
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.batch import BatchId
from psrpc.errors import (
    CheckpointError,
    InvalidArgument,
    NotReady,
    ResourceExhausted,
    StaleGeneration,
)
from psrpc.plan import Plan, aligned_empty
from tests.pserver.shards import (
    INCARNATION,
    MOMENTUM,
    SGD,
    NDArray,
    Sink,
    engine_of,
    identity_of,
    plan_of,
)

PLAN = plan_of(size=8, state=False)
ARENA = PLAN.arenas[0].name
A, B, C = BatchId(0, 0, 10), BatchId(0, 10, 10), BatchId(0, 20, 10)
WAIT_S = 30.0
KEPT = SnapshotOrder("step-0", write=False, keep=True, directory="", global_step=0)


def fence(generation: int = 1) -> Fence:
    return Fence(generation, 1, PLAN.hash, INCARNATION)


def filled(value: float) -> NDArray:
    array = aligned_empty(PLAN.arenas[0].length, "float32")
    array.fill(value)
    return array


def here(value: float) -> Shared:
    """Tensors that have arrived, all elements ``value``."""
    return Shared([filled(value).view(np.uint8)])


def initialized(engine: ShardEngine, generation: int = 1) -> ShardEngine:
    """The same engine, with values of 0."""
    request = InitializeRequest(fence(generation), tuple(shard_extents(PLAN, 0)))
    engine.initialize(request, here(0), WAIT_S)
    return engine


def a_push(
    batch: BatchId = A, attempt: int = 1, generation: int = 1, base: int = 0, worker: str = "w"
) -> PushRequest:
    return PushRequest(
        fence=fence(generation),
        worker=worker,
        attempt=Attempt(batch, attempt),
        base_version=base,
        examples=batch.count,
        skipped=False,
        extents=tuple(shard_extents(PLAN, 0)),
    )


def decision(*attempts: tuple[BatchId, int], number: int = 0, generation: int = 1) -> Decision:
    return Decision(generation, number, tuple(Attempt(b, n) for b, n in attempts))


def values(engine: ShardEngine, generation: int) -> list[float]:
    pulled = engine.pull(PullRequest(fence(generation), "w", None), 0)
    assert pulled.generation == generation
    return list(pulled.arrays[ARENA][:1])


def checkpoint(value: float, version: int, *batches: BatchId) -> Restored:
    applied = AppliedSet()
    for batch in batches:
        applied.add(batch)
    slots = Slots(scalars={"iterations": np.array(version)})
    return Restored({ARENA: filled(value)}, slots, applied, version)


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


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


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
    assert engine.begin(Begin(1, 1)) == begun(1, 0, held=False)
    initialized(engine)
    assert engine.push(a_push(), here(1), 0).outcome == "applied"


def test_kept_parameters_go_on_with_what_they_have_seen(shard: ShardEngine) -> None:
    shard.push(a_push(A), here(1), 0)
    reader = shard.pull(PullRequest(fence(), "w", None), 0)
    assert shard.begin(Begin(5, 1, keep=True)) == begun(5, 1, [0, 10])
    assert values(shard, 5) == [-1]
    assert reader.generation == 1
    assert shard.push(a_push(A, 9, generation=5), here(1), 0) == PushResult("already_applied", 1)
    assert shard.push(a_push(B, 9, generation=5), here(1), 0) == PushResult("applied", 2, 1)


def test_a_restored_shard_has_the_state_of_the_checkpoint_and_no_other(shard: ShardEngine) -> None:
    shard.push(a_push(A), here(1), 0)
    shard.push(a_push(B), here(1), 0)
    order = Begin(2, 1, restore="checkpoints/step-1")
    assert shard.begin(order, checkpoint(7, 1, C)) == begun(2, 1, [20, 30])
    assert values(shard, 2) == [7]
    assert shard.push(a_push(C, generation=2), here(1), 0).outcome == "already_applied"
    assert shard.push(a_push(A, generation=2), here(1), 0) == PushResult("applied", 2, 1)
    assert values(shard, 2) == [6]


def test_a_shard_that_begins_afresh_waits_for_a_worker(shard: ShardEngine) -> None:
    shard.push(a_push(A), here(1), 0)
    assert shard.begin(Begin(2, 1)) == begun(2, 0, held=False)
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
            engine.begin(order, checkpoint(7, 1, C))
        report = engine.report()
        assert (report.generation, report.initialized) == (2, False)
    with pytest.raises(NotReady):
        values(engine, 2)
    assert engine.begin(Begin(3, 1)) == begun(3, 0, held=False)


# -- orders that come again or late ----------------------------------------------------------


def test_an_order_that_was_carried_out_changes_nothing(shard: ShardEngine, sink: Sink) -> None:
    order = Begin(2, 1, restore="checkpoints/step-1")
    shard.begin(order, checkpoint(7, 0))
    shard.push(a_push(A, generation=2), here(1), 0)
    shard.take_snapshot(KEPT)
    assert shard.begin(order, checkpoint(7, 0)) == begun(2, 1, [0, 10])
    assert values(shard, 2) == [6]
    assert shard.pull(PullRequest(fence(2), "w", "step-0"), 0).version == 1
    assert sink.generations == [2]


def test_an_older_order_changes_nothing_and_is_not_answered(shard: ShardEngine) -> None:
    shard.begin(Begin(3, 1, keep=True))
    assert shard.begin(Begin(2, 1)) is None
    assert values(shard, 3) == [0]


# -- what of before is gone ------------------------------------------------------------------


def test_staged_gradients_are_dropped_and_their_memory_is_free(rounds: ShardEngine) -> None:
    for batch in (A, B):
        for attempt in (1, 2):
            rounds.push(a_push(batch, attempt), here(1), 0)
    rounds.begin(Begin(2, 1, keep=True))
    assert rounds.report().staged_now == 0
    # The pool has six sets; all of them can be had again, two of them at the same time.
    for number in range(4):
        for batch in (A, B):
            for attempt in (1, 2):
                rounds.push(a_push(batch, attempt, generation=2 + number), here(1), 0)
        rounds.begin(Begin(3 + number, 1, keep=True))
    with pytest.raises(NotReady, match="does not hold attempt 1"):
        rounds.decide(decision((A, 1), generation=6))


def test_snapshots_and_names_of_orders_are_forgotten(shard: ShardEngine, sink: Sink) -> None:
    shard.take_snapshot(KEPT)
    shard.push(a_push(A), here(1), 0)
    shard.begin(Begin(2, 1, keep=True))
    with pytest.raises(InvalidArgument, match="kept are: none"):
        shard.pull(PullRequest(fence(2), "w", "step-0"), 0)
    shard.take_snapshot(KEPT)
    assert sink.repeats == []
    assert sink.snapshots["step-0"].values.version == 1
    assert sink.snapshots["step-0"].values.generation == 2


# -- decisions that a shard is behind with ---------------------------------------------------


def test_a_shard_that_is_behind_applies_the_decision_first(rounds: ShardEngine, sink: Sink) -> None:
    rounds.push(a_push(A, 4), here(1), 0)
    rounds.push(a_push(B, 5), here(3), 0)
    late = replace(decision((A, 4), (B, 5)), snapshots=(KEPT,))
    assert rounds.begin(Begin(2, 1, keep=True, decision=late)) == begun(2, 1, [0, 20])
    assert values(rounds, 2) == [-2]
    assert not sink.snapshots, "of a generation that is over"


def test_a_decision_that_was_applied_is_not_applied_again(rounds: ShardEngine) -> None:
    rounds.push(a_push(A, 4), here(1), 0)
    rounds.decide(decision((A, 4)))
    order = Begin(2, 1, keep=True, decision=decision((A, 4)))
    assert rounds.begin(order) == begun(2, 1, [0, 10])
    rounds.push(a_push(B, 4, generation=2, base=1), here(1), 0)
    order = Begin(3, 1, keep=True, decision=decision((A, 4)))
    assert rounds.begin(order) == begun(3, 1, [0, 10]), "of an older generation than the shard's"


def test_a_decision_that_cannot_be_applied_leaves_all_as_it_was(rounds: ShardEngine) -> None:
    rounds.push(a_push(A, 4), here(1), 0)
    order = Begin(2, 1, keep=True, decision=decision((A, 4), (B, 5)))
    with pytest.raises(NotReady, match="does not hold attempt 5"):
        rounds.begin(order)
    assert values(rounds, 1) == [0]
    rounds.decide(decision((A, 4)))
    assert values(rounds, 1) == [-1]


# -- who is under way meanwhile --------------------------------------------------------------


class Arriving:
    """Tensors that come when they are let."""

    def __init__(self, value: float) -> None:
        self.begun, self.come = Event(), Event()
        self._value = value

    def place(self, plan: Plan, extents: Sequence[Extent]) -> None:
        return None

    def placed_rows(self) -> Sequence[Any]:
        return ()

    def receive(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        into: Mapping[str, Any],
        rows: Mapping[int, Any] | None = None,
    ) -> None:
        self.begun.set()
        assert self.come.wait(WAIT_S)
        into[ARENA].fill(self._value)


@pytest.mark.parametrize("replicas", [0, 2])
@pytest.mark.parametrize(
    "order", [Begin(2, 1, keep=True), Begin(2, 1, restore="c"), Begin(2, 1)], ids=str
)
def test_a_push_that_arrives_while_its_shard_begins_counts_nowhere(
    pool: ThreadPoolExecutor, replicas: int, order: Begin
) -> None:
    engine = initialized(engine_of(PLAN, replicas=replicas))
    arriving = Arriving(1)
    late = pool.submit(engine.push, a_push(A), arriving, WAIT_S)
    assert arriving.begun.wait(WAIT_S)
    before = engine.begin(order, checkpoint(7, 0))
    arriving.come.set()
    with pytest.raises(StaleGeneration, match="is of generation 1; shard 0 is in 2"):
        late.result(WAIT_S)
    with pytest.raises(StaleGeneration):
        engine.push(a_push(A), here(1), 0)
    assert engine.begin(order) == before
    assert engine.report().staged_now == 0


def all_buffers_taken(
    engine: ShardEngine, pool: ThreadPoolExecutor
) -> tuple[list[Arriving], list[Future[PushResult]]]:
    """Pushes that hold every buffer; the engine's pool has been made small before."""
    arrivals = [Arriving(1), Arriving(1)]
    pushes = [
        pool.submit(engine.push, a_push(BatchId(1, 10 * n, 10)), arriving, WAIT_S)
        for n, arriving in enumerate(arrivals)
    ]
    for arriving in arrivals:
        assert arriving.begun.wait(WAIT_S)
    return arrivals, pushes


class Waiting(Shared):
    """Tensors in chunks that a shard has no place for yet."""

    def place(self, plan: Plan, extents: Sequence[Extent]) -> None:  # type: ignore[override]
        return None

    def receive(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        into: Mapping[str, Any],
        rows: Mapping[int, Any] | None = None,
    ) -> None:
        raise AssertionError("nothing was to arrive any more")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> ShardEngine:
    """A shard with two buffers."""
    monkeypatch.setattr("pserver.intake.pool_size", lambda _nbytes, _replicas: 2)
    return initialized(engine_of(PLAN))


def asked(engine: ShardEngine, monkeypatch: pytest.MonkeyPatch) -> Event:
    """Set when a push has found that there is no buffer, and is about to wait."""
    waiting = Event()
    wait_for = engine._intake.pool._changed.wait_for

    def noticed(predicate: Any, timeout: float | None = None) -> Any:
        def once() -> Any:
            found = predicate()
            if not found:
                waiting.set()
            return found

        return wait_for(once, timeout)

    monkeypatch.setattr(engine._intake.pool._changed, "wait_for", noticed)
    return waiting


@pytest.mark.parametrize("what", ["begin", "revoke"])
def test_a_push_that_waits_for_a_buffer_learns_at_once_that_it_is_in_vain(
    full: ShardEngine, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    arrivals, pushes = all_buffers_taken(full, pool)
    waiting = asked(full, monkeypatch)
    late = pool.submit(full.push, a_push(A, worker="gone"), Waiting(()), 10 * WAIT_S)
    assert waiting.wait(WAIT_S)
    if what == "begin":
        full.begin(Begin(2, 1, keep=True))
    else:
        full.revoke(Revocation(1, "gone"))
    with pytest.raises(StaleGeneration):
        late.result(WAIT_S)
    for arriving in arrivals:
        arriving.come.set()
    errors = [push.exception(WAIT_S) for push in pushes]
    assert [type(e) for e in errors] == [StaleGeneration if what == "begin" else type(None)] * 2


def test_a_pull_that_waits_for_a_round_learns_of_another_generation(
    rounds: ShardEngine, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Event()
    wait_for = rounds._changed.wait_for

    def noticed(predicate: Any, timeout: float | None = None) -> Any:
        assert not predicate()
        waiting.set()
        return wait_for(predicate, timeout)

    monkeypatch.setattr(rounds._changed, "wait_for", noticed)
    late = pool.submit(rounds.pull, PullRequest(fence(), "w", 1), 10 * WAIT_S)
    assert waiting.wait(WAIT_S)
    # It even has the round that is awaited.
    rounds.begin(Begin(2, 1, restore="c"), checkpoint(7, 1))
    with pytest.raises(StaleGeneration):
        late.result(WAIT_S)


def test_a_decision_of_before_is_refused(rounds: ShardEngine) -> None:
    rounds.push(a_push(A, 4), here(1), 0)
    rounds.begin(Begin(2, 1, keep=True))
    rounds.push(a_push(A, 4, generation=2), here(5), 0)
    with pytest.raises(StaleGeneration, match="round 0 is of generation 1"):
        rounds.decide(decision((A, 4)))
    assert values(rounds, 2) == [0]


# -- workers that are gone -------------------------------------------------------------------


def test_a_revoked_worker_is_refused_and_its_attempts_are_dropped(rounds: ShardEngine) -> None:
    rounds.push(a_push(A, 1, worker="gone"), here(1), 0)
    rounds.push(a_push(B, 2, worker="gone"), here(1), 0)
    rounds.push(a_push(A, 3, worker="new"), here(3), 0)
    rounds.revoke(Revocation(1, "gone", (Attempt(A, 1), Attempt(C, 9))))
    assert rounds.report().revoked == 1
    with pytest.raises(StaleGeneration, match=r"gone was taken .*: register again"):
        rounds.push(a_push(A, 4, worker="gone"), here(1), 0)
    # What it has committed counts; and there is room for another try at the other one.
    rounds.push(a_push(A, 5, worker="new"), here(5), 0)
    rounds.decide(decision((A, 5), (B, 2)))
    assert values(rounds, 1) == [-3]


def test_a_push_under_way_of_a_revoked_worker_counts_nowhere(
    shard: ShardEngine, pool: ThreadPoolExecutor
) -> None:
    arriving = Arriving(1)
    late = pool.submit(shard.push, a_push(A, worker="gone"), arriving, WAIT_S)
    assert arriving.begun.wait(WAIT_S)
    shard.revoke(Revocation(1, "gone"))
    arriving.come.set()
    with pytest.raises(StaleGeneration):
        late.result(WAIT_S)
    assert values(shard, 1) == [0]
    assert shard.push(a_push(A, 2, worker="new"), here(1), 0).outcome == "applied"


def test_a_revoked_worker_that_pulls_learns_it(
    shard: ShardEngine, rounds: ShardEngine, pool: ThreadPoolExecutor
) -> None:
    shard.revoke(Revocation(1, "gone"))
    for source in (None, "released"):
        with pytest.raises(StaleGeneration, match="register again"):
            shard.pull(PullRequest(fence(), "gone", source), 0)
    late = pool.submit(rounds.pull, PullRequest(fence(), "gone", 1), 10 * WAIT_S)
    rounds.revoke(Revocation(1, "gone"))
    with pytest.raises(StaleGeneration, match="register again"):
        late.result(WAIT_S)


def test_a_revocation_counts_once_and_for_its_generation(rounds: ShardEngine) -> None:
    rounds.revoke(Revocation(2, "gone", (Attempt(A, 1),)))
    rounds.push(a_push(A, 1, worker="new"), here(1), 0)
    rounds.revoke(Revocation(2, "gone", (Attempt(A, 1),)))
    rounds.revoke(Revocation(1, "new", (Attempt(A, 1),)))
    assert (rounds.report().revoked, rounds.report().staged_now) == (2, 1)
    rounds.begin(Begin(2, 1, keep=True))
    assert rounds.report().revoked == 0
    rounds.push(a_push(A, 1, generation=2, worker="gone"), here(1), 0)
    rounds.revoke(Revocation(1, "other"))
    assert rounds.report().revoked == 1


def test_a_revocation_that_cannot_be_remembered_is_not_obeyed(
    shard: ShardEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pserver.revocations.MAX_REVOKED", 2)
    for number in (1, 2):
        shard.revoke(Revocation(number, f"worker-{number}"))
    with pytest.raises(ResourceExhausted, match="2 workers were revoked in generation 1"):
        shard.revoke(Revocation(3, "worker-3"))
    assert shard.report().revoked == 2
    with pytest.raises(StaleGeneration):
        shard.push(a_push(worker="worker-1"), here(1), 0)
