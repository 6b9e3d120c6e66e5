"""A shard under each policy: what it takes, what it refuses, what it says about it."""

from __future__ import annotations

import numpy as np
import pytest

from pserver.core.applied import AppliedSet
from pserver.core.counters import MAX_WORKERS, STALENESS_BUCKETS, Counters
from pserver.core.requests import PushResult, RestoredState
from pserver.transport.shard_memory import Shared
from pserver.updates.engine import Slots
from psrpc.core.batch import BatchId
from psrpc.core.commands import Begin
from psrpc.core.errors import (
    InvalidArgument,
    ResourceExhausted,
    StaleGeneration,
)
from psrpc.core.policy import Policy
from psrpc.ops.clock import ManualClock
from tests.pserver.bare_engine import (
    ARENA,
    ROUNDS,
    A,
    B,
    C,
    D,
    a_push,
    decision,
    filled,
    push,
    shard_of,
    value,
)
from tests.pserver.rows_cases import USER, ids_of, tables_plan, wanting
from tests.pserver.shards import (
    INITIAL,
    TRANSPORTS,
    Transport,
    counting,
    engine_of,
    fence_of,
    leased,
    part,
    plan_of,
    served,
    whole,
)


def test_a_policy_is_obeyed_from_the_order_that_brings_it() -> None:
    engine = shard_of(Policy())
    push(engine, A)
    begun = engine.commands.begin(Begin(2, 2, keep=True, settings=ROUNDS, version=40))
    assert begun is not None
    assert (begun.generation, begun.version) == (2, 40)
    with pytest.raises(StaleGeneration):
        push(engine, B)
    assert push(engine, B, 40, generation=2, policy=2).outcome == "staged"
    assert engine.report().waiting_for == (
        "the decision of round 40; it holds 1 of 2 micro-batches"
    )
    engine.commands.decide(decision((B, 1), number=40, generation=2))
    assert (value(engine, 2, 2), engine.report().version) == (-2.0, 41)
    # And back; without settings the policy stays.
    engine.commands.begin(Begin(3, 3, keep=True, settings=Policy(max_staleness=1)))
    engine.commands.begin(Begin(4, 3, keep=True))
    assert engine.identity.settings == Policy(max_staleness=1)
    assert engine.report().version == 41
    assert push(engine, C, 41, generation=4, policy=3).outcome == "applied"


def test_a_restored_shard_counts_on_from_the_version_it_is_told() -> None:
    engine = shard_of(Policy())
    slots = Slots(scalars={"iterations": np.array(7)})
    restored = RestoredState({ARENA: filled(3)}, slots, AppliedSet(), 7)
    begun = engine.commands.begin(Begin(2, 1, restore="c", version=100), restored)
    assert begun is not None
    assert begun.version == 100
    assert push(engine, A, 98, generation=2).staleness == 2
    with pytest.raises(InvalidArgument, match="base version 102; shard 0 is at 101"):
        push(engine, B, 102, generation=2)


def test_a_pull_with_a_push_of_before_learns_of_the_change_first() -> None:
    engine = shard_of(Policy())
    engine.commands.begin(Begin(2, 2, keep=True, settings=ROUNDS))
    here = Shared([filled(1).view(np.uint8)])
    with pytest.raises(StaleGeneration):
        engine.push_pull(a_push(), here, 0, "plain")
    with pytest.raises(InvalidArgument, match="pull the next round"):
        engine.push_pull(a_push(generation=2, policy=2), here, 0, "plain")


def test_buffers_follow_the_policy() -> None:
    engine = shard_of(Policy())
    engine.commands.begin(Begin(2, 1, keep=True, settings=Policy(mode="sync", replicas=10)))
    batches = [BatchId(0, 10 * n, 10) for n in range(10)]
    for batch in batches:
        for attempt in (1, 2):
            push(engine, batch, attempt=attempt, generation=2)
    assert engine._intake.pool.in_use == 20
    engine.commands.begin(Begin(3, 1, keep=True, settings=Policy(mode="sync", replicas=1)))
    assert engine._intake.pool.in_use == 0
    push(engine, A, generation=3)
    push(engine, A, attempt=2, generation=3)
    assert engine._intake.pool.in_use == 2
    with pytest.raises(ResourceExhausted):
        push(engine, B, generation=3)


# -- the age of gradients --------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_gradient_too_stale_changes_nothing_and_returns_the_newest(transport: Transport) -> None:
    plan = plan_of()
    engine = engine_of(plan, policy=Policy(max_staleness=1))
    with served(engine, transport=transport) as client:
        found = fence_of(client)
        client.initialize(found, counting(plan), INITIAL)
        ones = part(plan, whole(plan, 1.0))
        for n in range(2):
            client.push(found, leased("worker-1", BatchId(0, n, 1), 1, n, ones))
        into = whole(plan, -1.0)
        other = fence_of(client, worker="late")
        late = leased("late", BatchId(0, 9, 1), 1, 0, ones)
        result, info = client.push_pull(other, late, into)
        assert result == PushResult("too_stale", 2, 2)
        assert info.version == 2
        expected = counting(plan)["float32.trainable"] - 2
        assert into["float32.trainable"].tobytes() == expected.tobytes()
        assert client.push(other, late).outcome == "too_stale"
        status = client.get_status()
        assert (status.too_stale, status.applied, status.refused, status.version) == (2, 2, 0, 2)
        assert status.settings == "async max_staleness=1"
        # Its batch is not applied, so another attempt of it counts; 1 is not too stale.
        again = leased("late", BatchId(0, 9, 1), 2, 1, ones)
        assert client.push(other, again) == PushResult("applied", 3, 1)
        assert client.push(other, late).outcome == "already_applied"


def test_a_skipped_batch_is_skipped_at_any_age() -> None:
    engine = shard_of(Policy(max_staleness=0))
    push(engine, A)
    skipped = engine.push(a_push(B, skipped=True), Shared([]), 0)
    assert skipped.outcome == "skipped"


def test_a_stale_gradient_counts_less_where_that_is_asked_for() -> None:
    engine = shard_of(Policy(staleness_lr="inverse"))
    push(engine, A)
    push(engine, B, 0, 4.0)
    push(engine, C, 0, 3.0)
    assert value(engine) == -1.0 - 2.0 - 1.0


def test_rates_are_scaled_after_a_warm_up_that_outlasts_a_restart() -> None:
    engine = shard_of(Policy())
    engine.commands.begin(Begin(2, 1, keep=True, rate_scale=5.0, warmup_updates=4))
    for n, batch in enumerate((A, B)):
        push(engine, batch, n, generation=2)
    assert value(engine, 2) == -(1.0 + 2.0)
    snapshot = engine._held.snapshot()
    assert snapshot.slots.iterations == 2
    restored = RestoredState({ARENA: filled(0)}, snapshot.slots, AppliedSet(), 2)
    engine.commands.begin(Begin(3, 1, restore="c", rate_scale=5.0, warmup_updates=4), restored)
    for n, batch in enumerate((A, B, C)):
        push(engine, batch, 2 + n, generation=3)
    assert value(engine, 3) == -(3.0 + 4.0 + 5.0)
    engine.commands.begin(Begin(4, 1, keep=True))
    push(engine, D, 5, generation=4)
    assert value(engine, 4) == -13.0


def test_rounds_are_scaled_as_well_and_a_skipped_one_is_no_update() -> None:
    engine = shard_of(ROUNDS)
    engine.commands.begin(Begin(2, 1, keep=True, rate_scale=3.0, warmup_updates=2))
    engine.push(a_push(A, skipped=True, generation=2), Shared([]), 0)
    engine.commands.decide(decision((A, 1), generation=2))
    for n, batch in enumerate((B, C), 1):
        push(engine, batch, n, generation=2)
        engine.commands.decide(decision((batch, 1), number=n, generation=2))
    assert value(engine, 2) == -(1.0 + 2.0)


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
    engine.commands.begin(Begin(2, 1, keep=True, settings=ROUNDS))
    assert push(engine, B, 1, generation=2).apply_us == 0
    engine.commands.decide(decision((B, 1), number=1, generation=2))
    assert engine.report().counters.apply_s == 0.5


def test_a_stale_gradient_is_corrected_by_the_values_pulled_with_rows() -> None:
    plan = tables_plan()
    engine = engine_of(plan, policy=Policy(delay_compensation="constant"))
    with served(engine) as client:
        client.initialize(fence_of(client), counting(plan), INITIAL)
        fences = {worker: fence_of(client, worker=worker) for worker in ("a", "b")}
        for own in fences.values():
            client.pull(own, None, whole(plan), rows=wanting(client, {USER: ids_of(1)}))
        ones = part(plan, whole(plan, 1.0))
        for n, (worker, own) in enumerate(fences.items()):
            pushed = leased(worker, BatchId(0, n, 1), 1, 0, ones)
            assert client.push(own, pushed).outcome == "applied"
        status = client.get_status()
        assert list(status.staleness_counts) == [1, 1]
        assert status.uncompensated == 0


def test_a_status_says_all_of_it() -> None:
    plan = plan_of()
    policy = Policy(delay_compensation="constant")
    engine = engine_of(plan, policy=policy, clock=Ticking())
    with served(engine) as client:
        found = fence_of(client)
        client.initialize(found, counting(plan), INITIAL)
        ones = part(plan, whole(plan, 1.0))
        for n, worker in enumerate(("a", "b")):
            own = fence_of(client, worker=worker)
            result = client.push(own, leased(worker, BatchId(0, n, 1), 1, 0, ones))
            assert result.apply_us == 250_000
        status = client.get_status()
        assert {w.worker: list(w.counts) for w in status.workers} == {"a": [1], "b": [0, 1]}
        assert list(status.staleness_counts) == [1, 1]
        assert (status.uncompensated, status.apply_s) == (1, 0.5)
        assert status.settings == "async delay_compensation=constant"
