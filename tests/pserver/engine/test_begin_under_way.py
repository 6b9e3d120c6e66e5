"""Requests under way when a shard begins anew, or when their worker is revoked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from pserver.core.assembly import Extent, Seen
from pserver.core.requests import PullRequest, PushResult
from pserver.engine.engine import ShardEngine
from pserver.transport.shard_memory import Shared
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Begin, Revocation
from psrpc.core.errors import (
    ResourceExhausted,
    StaleGeneration,
)
from psrpc.core.plan import Plan
from tests.pserver.bare_engine import (
    ARENA,
    PLAN,
    WAIT_S,
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
    engine_of,
)


@pytest.fixture
def shard() -> ShardEngine:
    """Async, of generation 1, with values of 0."""
    return initialized(engine_of(PLAN))


@pytest.fixture
def rounds() -> ShardEngine:
    """The same in sync mode, with two micro-batches in a round."""
    return initialized(engine_of(PLAN, replicas=2))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Arriving:
    """Tensors that come when they are let."""

    def __init__(self, value: float) -> None:
        self.begun, self.come = Event(), Event()
        self._value = value

    def in_place(self, plan: Plan, extents: Sequence[Extent], tables: int) -> None:
        return None

    def receive(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        into: Mapping[str, Any],
        rows: Mapping[int, Any] | None = None,
        seen: Seen | None = None,
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
    before = engine.commands.begin(order, checkpoint(7, 0))
    arriving.come.set()
    with pytest.raises(StaleGeneration, match="is of generation 1; shard 0 is in 2"):
        late.result(WAIT_S)
    with pytest.raises(StaleGeneration):
        engine.push(a_push(A), here(1), 0)
    assert engine.commands.begin(order) == before
    assert engine.report().staged_now == 0


def all_buffers_taken(
    engine: ShardEngine, pool: ThreadPoolExecutor
) -> tuple[list[Arriving], list[Future[PushResult]]]:
    """Pushes that hold every buffer; the engine's pool has been made small before."""
    arrivals = [Arriving(1), Arriving(1)]
    pushes = [
        pool.submit(engine.push, a_push(BatchId(1, 10 * n, 10), worker=f"w{n}"), arriving, WAIT_S)
        for n, arriving in enumerate(arrivals)
    ]
    for arriving in arrivals:
        assert arriving.begun.wait(WAIT_S)
    return arrivals, pushes


class Waiting(Shared):
    """Tensors in chunks that a shard has no place for yet."""

    def in_place(  # type: ignore[override]
        self, plan: Plan, extents: Sequence[Extent], tables: int
    ) -> None:
        return None

    def receive(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        into: Mapping[str, Any],
        rows: Mapping[int, Any] | None = None,
        seen: Seen | None = None,
    ) -> None:
        raise AssertionError("nothing was to arrive any more")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> ShardEngine:
    """A shard with two buffers."""
    monkeypatch.setattr("pserver.engine.intake.pool_size", lambda _nbytes, _replicas: 2)
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
        full.commands.begin(Begin(2, 1, keep=True))
    else:
        full.commands.revoke(Revocation(1, "gone"))
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
    rounds.commands.begin(Begin(2, 1, restore="c"), checkpoint(7, 1))
    with pytest.raises(StaleGeneration):
        late.result(WAIT_S)


def test_a_decision_of_before_is_refused(rounds: ShardEngine) -> None:
    rounds.push(a_push(A, 4), here(1), 0)
    rounds.commands.begin(Begin(2, 1, keep=True))
    rounds.push(a_push(A, 4, generation=2), here(5), 0)
    with pytest.raises(StaleGeneration, match="round 0 is of generation 1"):
        rounds.commands.decide(decision((A, 4)))
    assert values(rounds, 2) == [0]


# -- workers that are gone -------------------------------------------------------------------


def test_a_revoked_worker_is_refused_and_its_attempts_are_dropped(rounds: ShardEngine) -> None:
    rounds.push(a_push(A, 1, worker="gone"), here(1), 0)
    rounds.push(a_push(B, 2, worker="gone"), here(1), 0)
    rounds.push(a_push(A, 3, worker="new"), here(3), 0)
    rounds.commands.revoke(Revocation(1, "gone", (Attempt(A, 1), Attempt(C, 9))))
    assert rounds.report().revoked == 1
    with pytest.raises(StaleGeneration, match=r"gone was taken .*: register again"):
        rounds.push(a_push(A, 4, worker="gone"), here(1), 0)
    # What it has committed counts; and there is room for another try at the other one.
    rounds.push(a_push(A, 5, worker="new"), here(5), 0)
    rounds.commands.decide(decision((A, 5), (B, 2)))
    assert values(rounds, 1) == [-3]


def test_a_push_under_way_of_a_revoked_worker_counts_nowhere(
    shard: ShardEngine, pool: ThreadPoolExecutor
) -> None:
    arriving = Arriving(1)
    late = pool.submit(shard.push, a_push(A, worker="gone"), arriving, WAIT_S)
    assert arriving.begun.wait(WAIT_S)
    shard.commands.revoke(Revocation(1, "gone"))
    arriving.come.set()
    with pytest.raises(StaleGeneration):
        late.result(WAIT_S)
    assert values(shard, 1) == [0]
    assert shard.push(a_push(A, 2, worker="new"), here(1), 0).outcome == "applied"


def test_a_revoked_worker_that_pulls_learns_it(
    shard: ShardEngine, rounds: ShardEngine, pool: ThreadPoolExecutor
) -> None:
    shard.commands.revoke(Revocation(1, "gone"))
    for source in (None, "released"):
        with pytest.raises(StaleGeneration, match="register again"):
            shard.pull(PullRequest(fence(), "gone", source), 0)
    late = pool.submit(rounds.pull, PullRequest(fence(), "gone", 1), 10 * WAIT_S)
    rounds.commands.revoke(Revocation(1, "gone"))
    with pytest.raises(StaleGeneration, match="register again"):
        late.result(WAIT_S)


def test_a_revocation_counts_once_and_for_its_generation(rounds: ShardEngine) -> None:
    rounds.commands.revoke(Revocation(2, "gone", (Attempt(A, 1),)))
    rounds.push(a_push(A, 1, worker="new"), here(1), 0)
    rounds.commands.revoke(Revocation(2, "gone", (Attempt(A, 1),)))
    rounds.commands.revoke(Revocation(1, "new", (Attempt(A, 1),)))
    assert (rounds.report().revoked, rounds.report().staged_now) == (2, 1)
    rounds.commands.begin(Begin(2, 1, keep=True))
    assert rounds.report().revoked == 0
    rounds.push(a_push(A, 1, generation=2, worker="gone"), here(1), 0)
    rounds.commands.revoke(Revocation(1, "other"))
    assert rounds.report().revoked == 1


def test_a_revocation_that_cannot_be_remembered_is_not_obeyed(
    shard: ShardEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pserver.core.fence.MAX_REVOKED", 2)
    for number in (1, 2):
        shard.commands.revoke(Revocation(number, f"worker-{number}"))
    with pytest.raises(ResourceExhausted, match="2 workers were revoked in generation 1"):
        shard.commands.revoke(Revocation(3, "worker-3"))
    assert shard.report().revoked == 2
    with pytest.raises(StaleGeneration):
        shard.push(a_push(worker="worker-1"), here(1), 0)
