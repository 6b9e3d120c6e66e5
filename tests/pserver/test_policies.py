"""A shard under each policy: what it takes, what it refuses, what it says about it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest

from pserver.applied import AppliedSet
from pserver.arrival import Shared
from pserver.assembly import shard_extents
from pserver.client import Push
from pserver.counters import MAX_WORKERS, STALENESS_BUCKETS, Counters
from pserver.engine import ShardEngine
from pserver.fence import Fence
from pserver.requests import (
    Begin,
    Decision,
    InitializeRequest,
    PullRequest,
    PushRequest,
    PushResult,
    Restored,
)
from pserver.staging import Attempt
from pserver.updates.engine import Slots
from psrpc.batch import BatchId
from psrpc.clock import ManualClock
from psrpc.errors import (
    InvalidArgument,
    NotReady,
    ResourceExhausted,
    RoundPassed,
    StaleGeneration,
)
from psrpc.plan import aligned_empty
from psrpc.policy import Policy
from tests.pserver.shards import (
    INCARNATION,
    NDArray,
    counting,
    engine_of,
    part,
    plan_of,
    served,
    whole,
)

PLAN = plan_of(size=8, state=False)
ARENA = PLAN.arenas[0].name
A, B, C, D, E = (BatchId(0, 10 * n, 10) for n in range(5))
WAIT_S = 30.0

BACKUPS = Policy(mode="sync", replicas=3, aggregate=2)
ROUNDS = Policy(mode="sync", replicas=2)


def fence(generation: int = 1, policy: int = 1) -> Fence:
    return Fence(generation, policy, PLAN.hash, INCARNATION)


def filled(value: float) -> NDArray:
    array = aligned_empty(PLAN.arenas[0].length, "float32")
    array.fill(value)
    return array


def shard_of(policy: Policy, **options: Any) -> ShardEngine:
    """A shard with values of 0."""
    engine = engine_of(PLAN, policy=policy, **options)
    engine.initialize(
        InitializeRequest(fence(), tuple(shard_extents(PLAN, 0))),
        Shared([filled(0).view(np.uint8)]),
        0,
    )
    return engine


def a_push(
    batch: BatchId = A,
    base: int = 0,
    attempt: int = 1,
    *,
    worker: str = "w",
    skipped: bool = False,
    generation: int = 1,
    policy: int = 1,
) -> PushRequest:
    extents = () if skipped else tuple(shard_extents(PLAN, 0))
    found = fence(generation, policy)
    return PushRequest(found, worker, Attempt(batch, attempt), base, batch.count, skipped, extents)


def push(
    engine: ShardEngine, batch: BatchId, base: int = 0, value: float = 1.0, **options: Any
) -> PushResult:
    return engine.push(a_push(batch, base, **options), Shared([filled(value).view(np.uint8)]), 0)


def value(engine: ShardEngine, generation: int = 1, policy: int = 1) -> float:
    request = PullRequest(fence(generation, policy), "reader", None)
    (found,) = set(engine.pull(request, 0).arrays[ARENA])
    return float(found)


def decision(*attempts: tuple[BatchId, int], number: int = 0, generation: int = 1) -> Decision:
    return Decision(generation, number, tuple(Attempt(b, n) for b, n in attempts))


# -- a policy comes with an order to begin ---------------------------------------------------


def test_a_policy_is_obeyed_from_the_order_that_brings_it() -> None:
    engine = shard_of(Policy())
    push(engine, A)
    begun = engine.begin(Begin(2, 2, keep=True, settings=ROUNDS, version=40))
    assert begun is not None
    assert (begun.generation, begun.version) == (2, 40)
    with pytest.raises(StaleGeneration):
        push(engine, B)
    assert push(engine, B, 40, generation=2, policy=2).outcome == "staged"
    assert engine.report().waiting_for == (
        "the decision of round 40; it holds 1 of 2 micro-batches"
    )
    engine.decide(decision((B, 1), number=40, generation=2))
    assert (value(engine, 2, 2), engine.report().version) == (-2.0, 41)
    # And back; without settings the policy stays.
    engine.begin(Begin(3, 3, keep=True, settings=Policy(max_staleness=1)))
    engine.begin(Begin(4, 3, keep=True))
    assert engine.identity.settings == Policy(max_staleness=1)
    assert engine.report().version == 41
    assert push(engine, C, 41, generation=4, policy=3).outcome == "applied"


def test_a_restored_shard_counts_on_from_the_version_it_is_told() -> None:
    engine = shard_of(Policy())
    slots = Slots(scalars={"iterations": np.array(7)})
    restored = Restored({ARENA: filled(3)}, slots, AppliedSet(), 7)
    begun = engine.begin(Begin(2, 1, restore="c", version=100), restored)
    assert begun is not None
    assert begun.version == 100
    assert push(engine, A, 98, generation=2).staleness == 2
    with pytest.raises(InvalidArgument, match="base version 102; shard 0 is at 101"):
        push(engine, B, 102, generation=2)


def test_a_pull_with_a_push_of_before_learns_of_the_change_first() -> None:
    engine = shard_of(Policy())
    engine.begin(Begin(2, 2, keep=True, settings=ROUNDS))
    here = Shared([filled(1).view(np.uint8)])
    with pytest.raises(StaleGeneration):
        engine.push_pull(a_push(), here, 0, "plain")
    with pytest.raises(InvalidArgument, match="pull the next round"):
        engine.push_pull(a_push(generation=2, policy=2), here, 0, "plain")


def test_buffers_follow_the_policy() -> None:
    engine = shard_of(Policy())
    engine.begin(Begin(2, 1, keep=True, settings=Policy(mode="sync", replicas=10)))
    batches = [BatchId(0, 10 * n, 10) for n in range(10)]
    for batch in batches:
        for attempt in (1, 2):
            push(engine, batch, attempt=attempt, generation=2)
    assert engine._intake.pool.in_use == 20
    engine.begin(Begin(3, 1, keep=True, settings=Policy(mode="sync", replicas=1)))
    assert engine._intake.pool.in_use == 0
    push(engine, A, generation=3)
    push(engine, A, attempt=2, generation=3)
    assert engine._intake.pool.in_use == 2
    with pytest.raises(ResourceExhausted):
        push(engine, B, generation=3)


# -- the age of gradients --------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_too_stale_changes_nothing_and_brings_the_newest(shared: bool) -> None:
    plan = plan_of()
    engine = engine_of(plan, policy=Policy(max_staleness=1))
    with served(engine, shared=shared) as client:
        found = client.fence(1, 1)
        client.initialize(found, counting(plan))
        ones = part(plan, whole(plan, 1.0))
        for n in range(2):
            client.push(found, Push("w", BatchId(0, n, 1), 1, n, ones))
        into = whole(plan, -1.0)
        late = Push("late", BatchId(0, 9, 1), 1, 0, ones)
        result, info = client.push_pull(found, late, into)
        assert result == PushResult("too_stale", 2, 2)
        assert info.version == 2
        expected = counting(plan)["float32.trainable"] - 2
        assert into["float32.trainable"].tobytes() == expected.tobytes()
        assert client.push(found, late).outcome == "too_stale"
        status = client.get_status()
        assert (status.too_stale, status.applied, status.refused, status.version) == (2, 2, 0, 2)
        assert status.settings == "async max_staleness=1"
        # Its batch is not applied, so another attempt of it counts; 1 is not too stale.
        again = Push("late", BatchId(0, 9, 1), 2, 1, ones)
        assert client.push(found, again) == PushResult("applied", 3, 1)
        assert client.push(found, late).outcome == "already_applied"


def test_a_skipped_batch_is_skipped_at_any_age() -> None:
    engine = shard_of(Policy(max_staleness=0))
    push(engine, A)
    skipped = engine.push(a_push(B, 0, skipped=True), Shared([]), 0)
    assert skipped.outcome == "skipped"


def test_a_stale_gradient_counts_less_where_that_is_asked_for() -> None:
    engine = shard_of(Policy(staleness_lr="inverse"))
    push(engine, A)
    push(engine, B, 0, 4.0)
    push(engine, C, 0, 3.0)
    assert value(engine) == -1.0 - 2.0 - 1.0


def test_rates_are_scaled_after_a_warm_up_that_outlasts_a_restart() -> None:
    engine = shard_of(Policy())
    engine.begin(Begin(2, 1, keep=True, rate_scale=5.0, warmup_updates=4))
    for n, batch in enumerate((A, B)):
        push(engine, batch, n, generation=2)
    assert value(engine, 2) == -(1.0 + 2.0)
    snapshot = engine._held.snapshot()
    assert snapshot.slots.iterations == 2
    restored = Restored({ARENA: filled(0)}, snapshot.slots, AppliedSet(), 2)
    engine.begin(Begin(3, 1, restore="c", rate_scale=5.0, warmup_updates=4), restored)
    for n, batch in enumerate((A, B, C)):
        push(engine, batch, 2 + n, generation=3)
    assert value(engine, 3) == -(3.0 + 4.0 + 5.0)
    engine.begin(Begin(4, 1, keep=True))
    push(engine, D, 5, generation=4)
    assert value(engine, 4) == -13.0


def test_rounds_are_scaled_as_well_and_a_skipped_one_is_no_update() -> None:
    engine = shard_of(ROUNDS)
    engine.begin(Begin(2, 1, keep=True, rate_scale=3.0, warmup_updates=2))
    engine.push(a_push(A, 0, skipped=True, generation=2), Shared([]), 0)
    engine.decide(decision((A, 1), generation=2))
    for n, batch in enumerate((B, C), 1):
        push(engine, batch, n, generation=2)
        engine.decide(decision((batch, 1), number=n, generation=2))
    assert value(engine, 2) == -(1.0 + 2.0)


# -- backup workers --------------------------------------------------------------------------


def test_what_a_round_leaves_counts_in_a_later_one_with_its_staleness() -> None:
    engine = shard_of(BACKUPS)
    for n, batch in enumerate((A, B, C)):
        push(engine, batch, value=float(n + 1), worker=f"w{n}")
    assert engine.report().waiting_for == (
        "the decision of round 0, which takes 2 micro-batches; it holds 3 of 3 that are open"
    )
    engine.decide(decision((A, 1), (C, 1)))
    assert (value(engine), engine.report().staged_now, engine._intake.pool.in_use) == (-2.0, 1, 1)
    # D's worker had pulled before the decision.
    assert push(engine, D, 0, 6.0, worker="w0").outcome == "staged"
    engine.decide(decision((B, 1), (D, 1), number=1))
    assert (value(engine), engine.report().staged_now, engine._intake.pool.in_use) == (-6.0, 0, 0)
    counters = engine.report().counters
    assert counters.staleness == [2, 2]
    assert counters.workers == {"w2": [1], "w1": [0, 1], "w0": [1, 1]}
    assert push(engine, B, 0).outcome == "already_applied"


def test_a_decided_micro_batch_takes_all_its_attempts_along() -> None:
    engine = shard_of(BACKUPS)
    for attempt in (1, 2):
        push(engine, A, attempt=attempt)
        push(engine, B, attempt=attempt)
    engine.decide(decision((A, 2)))
    assert (engine.report().staged_now, engine._intake.pool.in_use) == (2, 2)
    assert {a.batch for a in held(engine)} == {B}


def held(engine: ShardEngine) -> list[Attempt]:
    staging = engine._rounds._staging
    return [Attempt(b, n) for b, attempts in staging._held.items() for n in attempts]


def test_no_more_than_the_open_micro_batches_are_held() -> None:
    engine = shard_of(BACKUPS)
    for batch in (A, B, C):
        for attempt in (1, 2):
            push(engine, batch, attempt=attempt)
    with pytest.raises(ResourceExhausted, match="holds 3 micro-batches already"):
        push(engine, D)
    with pytest.raises(ResourceExhausted, match="attempts 1 and 2 are held"):
        push(engine, A, attempt=3)
    assert engine._intake.pool.in_use == 6


def test_without_backups_older_gradients_stay_refused() -> None:
    engine = shard_of(ROUNDS)
    push(engine, A)
    engine.decide(decision((A, 1)))
    with pytest.raises(RoundPassed):
        push(engine, B, 0)


def test_a_pull_of_the_newest_carries_its_decision_out() -> None:
    engine = shard_of(BACKUPS)
    push(engine, A)
    push(engine, B)
    request = PullRequest(fence(), "w", None, decision((A, 1), (B, 1)))
    assert engine.pull(request, 0).version == 1
    assert engine.pull(request, 0).version == 1


def test_a_pull_waits_for_the_decisions_before_its_own() -> None:
    engine = shard_of(BACKUPS)
    for batch in (A, B, C):
        push(engine, batch)
    first, second = decision((A, 1), (B, 1)), decision((C, 1), number=1)
    request = PullRequest(fence(), "w", None, second)
    with pytest.raises(NotReady, match="waits for the decision of round 0"):
        engine.pull(request, 0)
    waits = Event()
    wait_for = engine._changed.wait_for

    def noticed(predicate: Any, timeout: float | None = None) -> Any:
        assert not predicate()
        waits.set()
        return wait_for(predicate, timeout)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as threads:
        patch.setattr(engine._changed, "wait_for", noticed)
        pulled = threads.submit(engine.pull, request, WAIT_S)
        assert waits.wait(WAIT_S)
        engine.decide(first)
        assert pulled.result(WAIT_S).version == 2


# -- rounds after a time without -------------------------------------------------------------


def test_a_round_leaves_out_what_the_shard_has_applied() -> None:
    engine = shard_of(Policy())
    push(engine, A, value=8.0)
    engine.begin(Begin(2, 2, keep=True, settings=ROUNDS, version=5))
    who = {"generation": 2, "policy": 2}
    assert push(engine, A, 5, 8.0, **who).outcome == "already_applied"
    push(engine, B, 5, 2.0, **who)
    engine.decide(decision((A, 1), (B, 1), number=5, generation=2))
    assert value(engine, 2, 2) == -10.0, "no mean with what was not staged"
    assert engine.report().counters.applied == 2


def test_a_round_of_nothing_new_is_a_version_and_no_update() -> None:
    engine = shard_of(Policy())
    push(engine, A)
    push(engine, B, 1)
    engine.begin(Begin(2, 2, keep=True, settings=ROUNDS, version=5))
    engine.decide(decision((A, 1), (B, 1), number=5, generation=2))
    assert (engine.report().version, value(engine, 2, 2)) == (6, -2.0)
    assert engine._held.snapshot().slots.iterations == 2


# -- two attempts ----------------------------------------------------------------------------


def test_the_attempt_that_lost_gives_its_memory_back() -> None:
    engine = shard_of(Policy(mode="sync", replicas=2, speculate=True))
    push(engine, A, value=1.0, worker="slow")
    push(engine, A, value=1.0, worker="fast", attempt=2)
    push(engine, B, value=3.0, worker="fast")
    assert engine._intake.pool.in_use == 3
    engine.decide(decision((A, 2), (B, 1)))
    assert (value(engine), engine.report().staged_now, engine._intake.pool.in_use) == (-2.0, 0, 0)
    assert engine.report().counters.workers == {"fast": [2]}
    assert push(engine, A, 0, worker="slow", attempt=3).outcome == "already_applied"


# -- in sight --------------------------------------------------------------------------------


def test_staleness_is_counted_by_worker_and_those_longest_silent_are_forgotten() -> None:
    counters = Counters()
    for n in range(MAX_WORKERS):
        counters.count_applied(f"w{n}", 1)
    counters.count_applied("w0", STALENESS_BUCKETS + 5)
    counters.count_applied("new", 0)
    found = counters.reported()
    assert len(found.workers) == MAX_WORKERS
    assert "w1" not in found.workers
    assert found.workers["w0"] == [0, 1] + [0] * (STALENESS_BUCKETS - 3) + [1]
    assert found.workers["new"] == [1]
    assert found.applied == MAX_WORKERS + 2
    counters.count_applied("new", 0)
    assert found.workers["new"] == [1], "a copy"


class Ticking(ManualClock):
    """A clock that takes a quarter of a second between two looks."""

    def now(self) -> float:
        self.advance(0.25)
        return super().now()


def test_the_time_of_updates_is_measured() -> None:
    engine = shard_of(Policy(max_staleness=0), clock=Ticking())
    assert push(engine, A).apply_us == 250_000
    assert push(engine, B, 0).apply_us == 0
    assert engine.report().counters.apply_s == 0.25
    engine.begin(Begin(2, 1, keep=True, settings=ROUNDS))
    assert push(engine, B, 1, generation=2).apply_us == 0
    engine.decide(decision((B, 1), number=1, generation=2))
    assert engine.report().counters.apply_s == 0.5


def test_a_status_says_all_of_it() -> None:
    plan = plan_of()
    policy = Policy(delay_compensation="constant")
    engine = engine_of(plan, policy=policy, clock=Ticking())
    with served(engine) as client:
        found = client.fence(1, 1)
        client.initialize(found, counting(plan))
        ones = part(plan, whole(plan, 1.0))
        for n, worker in enumerate(("a", "b")):
            result = client.push(found, Push(worker, BatchId(0, n, 1), 1, 0, ones))
            assert result.apply_us == 250_000
        status = client.get_status()
        assert {w.worker: list(w.counts) for w in status.workers} == {"a": [1], "b": [0, 1]}
        assert list(status.staleness_counts) == [1, 1]
        assert (status.uncompensated, status.apply_s) == (1, 0.5)
        assert status.settings == "async delay_compensation=constant"
