"""A shard in sync mode under each policy: what a round takes, leaves and gives back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from pserver.core.requests import PullRequest
from pserver.engine.engine import ShardEngine
from psrpc.core.commands import Attempt, Begin
from psrpc.core.errors import (
    NotReady,
    ResourceExhausted,
    RoundPassed,
)
from psrpc.core.policy import Policy
from tests.pserver.bare_engine import (
    BACKUPS,
    ROUNDS,
    WAIT_S,
    A,
    B,
    C,
    D,
    decision,
    fence,
    push,
    shard_of,
    value,
)


def test_gradients_that_a_round_leaves_count_in_a_later_one_with_their_staleness() -> None:
    engine = shard_of(BACKUPS)
    for n, batch in enumerate((A, B, C)):
        push(engine, batch, value=float(n + 1), worker=f"w{n}")
    assert engine.report().waiting_for == (
        "the decision of round 0, which takes 2 micro-batches; it holds 3 of 3 that are open"
    )
    engine.commands.decide(decision((A, 1), (C, 1)))
    assert (value(engine), engine.report().staged_now, engine._intake.pool.in_use) == (-2.0, 1, 1)
    # D's worker had pulled before the decision.
    assert push(engine, D, 0, 6.0, worker="w0").outcome == "staged"
    engine.commands.decide(decision((B, 1), (D, 1), number=1))
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
    engine.commands.decide(decision((A, 2)))
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
    engine.commands.decide(decision((A, 1)))
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
        engine.commands.decide(first)
        assert pulled.result(WAIT_S).version == 2


# -- rounds after a time without -------------------------------------------------------------


def test_a_round_leaves_out_what_the_shard_has_applied() -> None:
    engine = shard_of(Policy())
    push(engine, A, value=8.0)
    engine.commands.begin(Begin(2, 2, keep=True, settings=ROUNDS, version=5))
    who = {"generation": 2, "policy": 2}
    assert push(engine, A, 5, 8.0, **who).outcome == "already_applied"
    push(engine, B, 5, 2.0, **who)
    engine.commands.decide(decision((A, 1), (B, 1), number=5, generation=2))
    assert value(engine, 2, 2) == -10.0, "no mean with what was not staged"
    assert engine.report().counters.applied == 2


def test_a_round_of_nothing_new_is_a_version_and_no_update() -> None:
    engine = shard_of(Policy())
    push(engine, A)
    push(engine, B, 1)
    engine.commands.begin(Begin(2, 2, keep=True, settings=ROUNDS, version=5))
    engine.commands.decide(decision((A, 1), (B, 1), number=5, generation=2))
    assert (engine.report().version, value(engine, 2, 2)) == (6, -2.0)
    assert engine._held.snapshot().slots.iterations == 2


# -- two attempts ----------------------------------------------------------------------------


def test_the_attempt_that_lost_gives_its_memory_back() -> None:
    engine = shard_of(Policy(mode="sync", replicas=2, speculate=True))
    push(engine, A, value=1.0, worker="slow")
    push(engine, A, value=1.0, worker="fast", attempt=2)
    push(engine, B, value=3.0, worker="fast")
    assert engine._intake.pool.in_use == 3
    engine.commands.decide(decision((A, 2), (B, 1)))
    assert (value(engine), engine.report().staged_now, engine._intake.pool.in_use) == (-2.0, 0, 0)
    assert engine.report().counters.workers == {"fast": [2]}
    assert push(engine, A, 0, worker="slow", attempt=3).outcome == "already_applied"
