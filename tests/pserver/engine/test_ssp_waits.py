"""Pushes and pulls of ssp at a shard: a worker that is too far ahead waits there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from pserver.core.requests import PullRequest, PushResult, Values
from pserver.engine.engine import ShardEngine
from pserver.transport.shard_memory import Shared
from pserver.transport.transport import Arrival
from psrpc.core.batch import BatchId
from psrpc.core.commands import AwaitedWorkers, Begin, Revocation, WorkerClock
from psrpc.core.errors import NotReady, StaleGeneration
from psrpc.core.plan import Plan
from psrpc.core.policy import Policy
from tests.pserver.bare_engine import ARENA, WAIT_S, A, B, C, a_push, fence, here, shard_of

FAST, SLOW = WorkerClock("", 1, 0), WorkerClock("", 2, 0)
Answer = tuple[PushResult, Values]


def pull(engine: ShardEngine, worker: str, clock: WorkerClock, timeout_s: float = 0.0) -> Values:
    return engine.pull(PullRequest(fence(), worker, None, clock=clock), timeout_s)


def step(
    engine: ShardEngine,
    worker: str,
    batch: BatchId,
    attempt: int,
    clock: WorkerClock | None,
    timeout_s: float = 0.0,
) -> Answer:
    push = a_push(batch, attempt, worker=worker)
    return engine.push_pull(push, here(1.0), timeout_s, "plain", None, clock)


def both(staleness: int = 0) -> ShardEngine:
    """A shard of two workers, of which the fast one has done a step."""
    engine = shard_of(Policy(mode="ssp", staleness=staleness))
    pull(engine, "fast", FAST)
    pull(engine, "slow", SLOW)
    return engine


class Piecewise:
    """A gradient of ones that needs a buffer of the shard to arrive in."""

    def in_place(self, *_extents: object) -> None:
        return

    def receive(self, _plan: Plan, _extents: object, into: Mapping[str, Any], *_: object) -> None:
        into[ARENA].fill(1.0)


def parked(engine: ShardEngine, arrival: Arrival | None = None) -> Future[Answer]:
    """The answer to the first push of the fast worker, which waits for the slow one."""
    waits = threading.Event()
    wait_for: Callable[..., bool] = engine._changed.wait_for

    def waiting(over: Callable[[], bool], timeout_s: float | None = None) -> bool:
        waits.set()
        return wait_for(over, timeout_s)

    engine._changed.wait_for = waiting  # type: ignore[method-assign, assignment]
    pool = ThreadPoolExecutor(1)
    push = a_push(A, 1, worker="fast")
    answer = pool.submit(engine.push_pull, push, arrival or here(1.0), WAIT_S, "plain", None, FAST)
    pool.shutdown(wait=False)
    assert waits.wait(WAIT_S)
    with engine._changed:
        # It has let go of the lock, so it waits.
        assert not answer.done()
    return answer


def test_a_push_is_answered_with_values_that_have_the_step_it_waited_for() -> None:
    engine = both()
    answer = parked(engine)
    step(engine, "slow", B, 2, SLOW)
    result, values = answer.result(WAIT_S)
    assert (result.outcome, result.behind) == ("applied", False)
    assert (values.version, float(values.arrays[ARENA][0])) == (2, -2.0)


def test_a_push_that_has_waited_in_vain_counts_and_says_that_its_values_are_old() -> None:
    engine = both()
    result, values = step(engine, "fast", A, 1, FAST)
    assert (result.outcome, result.behind, values.version) == ("applied", True, 1)
    result, _ = step(engine, "fast", A, 1, FAST)
    assert (result.outcome, result.behind) == ("already_applied", True)
    with pytest.raises(NotReady, match="slow to catch up with fast"):
        pull(engine, "fast", FAST)
    step(engine, "slow", B, 2, SLOW)
    assert pull(engine, "fast", FAST).version == 2


def test_a_batch_that_another_worker_has_done_or_that_is_skipped_is_a_step() -> None:
    engine = both()
    assert step(engine, "fast", A, 1, FAST)[0].behind
    assert step(engine, "slow", A, 2, SLOW)[0].outcome == "already_applied"
    pull(engine, "fast", FAST)
    assert step(engine, "fast", B, 3, FAST)[0].behind
    push = a_push(C, 4, worker="slow", skipped=True)
    assert engine.push_pull(push, Shared([]), 0, "plain", None, SLOW)[0].outcome == "skipped"
    pull(engine, "fast", FAST)


def test_a_worker_may_be_s_steps_ahead() -> None:
    engine = both(staleness=1)
    assert not step(engine, "fast", A, 1, FAST)[0].behind
    assert step(engine, "fast", B, 2, FAST)[0].behind


def test_a_client_that_knows_no_clocks_does_not_wait_and_its_steps_count() -> None:
    engine = shard_of(Policy(mode="ssp", staleness=0))
    pull(engine, "fast", FAST)
    old = WorkerClock("old", 2, 0)
    engine.commands.await_workers(AwaitedWorkers(2, (WorkerClock("fast", 1, 0), old)))
    assert step(engine, "fast", A, 1, FAST)[0].behind
    assert not step(engine, "old", B, 2, None)[0].behind
    assert not step(engine, "old", C, 3, None)[0].behind
    pull(engine, "fast", FAST)


def test_a_waiting_worker_goes_on_when_others_wait_for_the_slow_one_no_more() -> None:
    engine = both()
    answer = parked(engine)
    engine.commands.await_workers(AwaitedWorkers(3, (WorkerClock("fast", 1, 0),)))
    assert not answer.result(WAIT_S)[0].behind


def test_a_waiting_worker_goes_on_when_the_slow_one_is_revoked() -> None:
    engine = both()
    answer = parked(engine)
    engine.commands.revoke(Revocation(1, "slow"))
    assert not answer.result(WAIT_S)[0].behind


def test_a_waiting_worker_that_is_revoked_hears_that() -> None:
    engine = both()
    answer = parked(engine)
    engine.commands.revoke(Revocation(1, "fast"))
    with pytest.raises(StaleGeneration):
        answer.result(WAIT_S)


def test_a_waiting_worker_hears_of_another_generation() -> None:
    engine = both()
    answer = parked(engine)
    engine.commands.begin(Begin(2, 1, keep=True))
    with pytest.raises(StaleGeneration):
        answer.result(WAIT_S)


def test_a_waiting_worker_hears_when_the_shard_closes() -> None:
    engine = both()
    answer = parked(engine)
    engine.close()
    assert answer.result(WAIT_S)[0].behind
    with pytest.raises(NotReady):
        pull(engine, "fast", FAST)


def test_a_waiting_worker_holds_no_buffer() -> None:
    engine = both()
    answer = parked(engine, Piecewise())
    assert not engine._intake.pool._arriving
    step(engine, "slow", B, 2, SLOW)
    answer.result(WAIT_S)
