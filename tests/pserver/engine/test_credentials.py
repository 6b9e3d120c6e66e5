"""A real shard and the proofs that its callers bring, on every transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from coordinator.job.authority import Authority
from pserver.client.client import ShardClient
from pserver.client.requests import GradientPush
from pserver.engine.engine import ShardEngine
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Begin, WorkerClock
from psrpc.core.errors import AccessDenied, StaleGeneration
from psrpc.security.signatures import receipt_of
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import to_batch, to_clock
from tests.pserver.shards import (
    AUTHORITY,
    INITIAL,
    WITH_OWN,
    Sink,
    Transport,
    counting,
    engine_of,
    fence_of,
    grant_of,
    leased,
    part,
    plan_of,
    served,
    session_of,
    signed,
    whole,
)

PLAN = plan_of()
OTHER = Authority(Random(9).randbytes)
A, B = BatchId(0, 0, 5), BatchId(0, 5, 5)
GOOD = leased("worker-1", A, 1, 0, part(PLAN, whole(PLAN, 1.0)))


class Shard:
    """An initialized one, and its client; ``sink`` has its snapshots."""

    def __init__(self, engine: ShardEngine, client: ShardClient, sink: Sink) -> None:
        self.engine = engine
        self.client = client
        self.sink = sink

    def denied(self, code: str, call: Callable[[], object], refused: int = 0) -> None:
        """``call`` is denied and changes nothing; ``refused`` pushes are counted."""
        before = self.engine.report()
        with pytest.raises(AccessDenied) as caught:
            call()
        assert caught.value.code == code
        after = self.engine.report()
        counters = replace(before.counters, refused=before.counters.refused + refused)
        assert after == replace(before, counters=counters)
        self.unchanged()

    def unchanged(self) -> None:
        into = whole(PLAN, -1.0)
        self.client.pull(fence_of(self.client), None, into)
        assert all((into[name] == array).all() for name, array in counting(PLAN).items())
        assert not self.engine.applied().to_epochs()
        assert self.engine.report().version == 0
        assert not self.sink.snapshots
        assert not self.sink.failures

    def push(self, push: GradientPush, session: bytes | None = None) -> Callable[[], object]:
        return lambda: self.client.push(self.fence(session), push)

    def exchange(self, push: GradientPush, session: bytes | None = None) -> Callable[[], object]:
        return lambda: self.client.push_pull(self.fence(session), push, whole(PLAN))

    def pull(self, session: bytes | None = None) -> Callable[[], object]:
        return lambda: self.client.pull(self.fence(session), None, whole(PLAN))

    def fence(self, session: bytes | None) -> types.Fence:
        return self.client.fence(1, 1, session_of("worker-1") if session is None else session)


@pytest.fixture(params=WITH_OWN)
def transport(request: pytest.FixtureRequest) -> Transport:
    found: Transport = request.param
    return found


@pytest.fixture
def shard(transport: Transport) -> Iterator[Shard]:
    sink = Sink()
    engine = engine_of(PLAN, sink=sink)
    with served(engine, transport=transport) as client:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        yield Shard(engine, client, sink)


@pytest.fixture
def sync(transport: Transport) -> Iterator[Shard]:
    sink = Sink()
    engine = engine_of(PLAN, replicas=1, sink=sink)
    with served(engine, transport=transport) as client:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        yield Shard(engine, client, sink)


# -- sessions --------------------------------------------------------------------------------

SESSIONS = {
    "none": b"",
    "of another coordinator": OTHER.open_session("worker-1", ""),
    "changed": session_of("worker-1")[:-1] + b"!",
}


@pytest.mark.parametrize("session", SESSIONS.values(), ids=SESSIONS)
def test_a_caller_without_a_session_of_the_jobs_coordinator(shard: Shard, session: bytes) -> None:
    for call in (shard.push(GOOD, session), shard.exchange(GOOD, session)):
        shard.denied("PS309", call, refused=1)
    shard.denied("PS309", shard.pull(session))
    # Where it was right, the same is taken.
    assert shard.client.push(fence_of(shard.client), GOOD).outcome == "applied"


def test_a_session_of_another_certificate_is_to_be_opened_anew(shard: Shard) -> None:
    with pytest.raises(StaleGeneration, match="registered with certificate 'edge-1' and calls"):
        shard.pull(session_of("worker-1", "edge-1"))()


def test_a_shard_that_has_no_keys_yet_knows_no_session() -> None:
    engine = engine_of(PLAN)
    engine._gate.identity = replace(engine.identity, keys=None)
    with served(engine) as client, pytest.raises(AccessDenied, match="knows no session yet"):
        client.initialize(fence_of(client), counting(PLAN), INITIAL)


# -- first values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("session", "grant", "code"),
    [
        (b"", INITIAL, "PS309"),
        (OTHER.open_session("worker-1", ""), INITIAL, "PS309"),
        (session_of("worker-1"), b"", "PS305"),
        (session_of("worker-2"), INITIAL, "PS305"),
        (session_of("worker-1"), AUTHORITY.grant_initialize("worker-1", 2), "PS305"),
        (session_of("worker-1"), OTHER.grant_initialize("worker-1", 1), "PS305"),
        (session_of("worker-1"), grant_of("worker-1", A, 1), "PS305"),
    ],
)
def test_first_values_come_from_the_worker_that_was_told_to(
    session: bytes, grant: bytes, code: str
) -> None:
    engine = engine_of(PLAN)
    with served(engine) as client:
        with pytest.raises(AccessDenied) as caught:
            client.initialize(client.fence(1, 1, session), whole(PLAN, 9.0), grant)
        assert caught.value.code == code
        assert not client.get_status().initialized
        assert client.initialize(fence_of(client), counting(PLAN), INITIAL)


# -- grants ----------------------------------------------------------------------------------

GRANTS = {
    "none": b"",
    "another worker's": grant_of("worker-2", A, 1),
    "another attempt's": grant_of("worker-1", A, 2),
    "another batch's": grant_of("worker-1", B, 1),
    "another generation's": grant_of("worker-1", A, 1, generation=2),
    "another coordinator's": OTHER.grant("worker-1", 1, Attempt(A, 1)),
    "to initialize": INITIAL,
}


@pytest.mark.parametrize("grant", GRANTS.values(), ids=GRANTS)
def test_a_push_of_what_was_not_leased_changes_nothing(shard: Shard, grant: bytes) -> None:
    for push in (replace(GOOD, grant=grant), replace(GOOD, grant=grant, gradients=None)):
        # The second would have shards and coordinator take the batch for done without a gradient.
        shard.denied("PS305", shard.push(push), refused=1)
        shard.denied("PS305", shard.exchange(push), refused=1)
    assert shard.client.push(fence_of(shard.client), GOOD).outcome == "applied"
    report = shard.engine.report()
    assert (report.version, report.counters.applied, report.counters.skipped) == (1, 1, 0)


def test_the_session_says_whose_push_it_is(shard: Shard) -> None:
    """Nothing of what a worker says about itself: a grant of another one does not help."""
    shard.denied("PS305", shard.push(GOOD, session_of("worker-2")), refused=1)
    other = leased("worker-2", B, 2, 0, GOOD.gradients)
    fence = fence_of(shard.client, worker="worker-2")
    assert shard.client.push(fence, other).outcome == "applied"
    assert set(shard.engine.report().counters.workers) == {"worker-2"}


def test_a_staged_attempt_is_of_the_worker_that_has_its_grant(sync: Shard) -> None:
    stolen = replace(GOOD, gradients=part(PLAN, whole(PLAN, 1e6)))
    sync.denied("PS305", sync.push(stolen, session_of("worker-2")), refused=1)
    assert sync.engine.report().staged_now == 0
    assert sync.client.push(fence_of(sync.client), GOOD).outcome == "staged"


@pytest.mark.parametrize("changed", [{}, {"entry": 2}, {"steps": 7}, {"worker": "worker-2"}])
def test_a_clock_that_was_not_leased_holds_no_worker(shard: Shard, changed: dict[str, Any]) -> None:
    """Others would wait for a worker that the coordinator does not know to be awaited."""
    leased_clock = AUTHORITY.proven(1, WorkerClock("worker-1", 1, 5))
    clock = to_clock(replace(leased_clock, **changed) if changed else WorkerClock("worker-1", 1, 5))
    fence = fence_of(shard.client, worker=clock.worker)
    into = whole(PLAN)
    shard.denied("PS305", lambda: shard.client.pull(fence, None, into, clock=clock))
    shard.denied("PS305", lambda: shard.client.push_pull(fence, GOOD, into, clock=clock), refused=1)
    mine = fence_of(shard.client)
    assert shard.client.pull(mine, None, into, clock=to_clock(leased_clock)).version == 0


# -- receipts --------------------------------------------------------------------------------


@pytest.mark.parametrize("skipped", [False, True])
def test_a_push_is_answered_with_a_receipt(shard: Shard, skipped: bool) -> None:
    push = replace(GOOD, gradients=None) if skipped else GOOD
    expected = receipt_of(AUTHORITY.keys.grant, "worker-1", 1, A, 1, 0, skipped)
    for _ in range(2):
        # The second time the shard has it, and says the same.
        assert shard.client.push(fence_of(shard.client), push).receipt == expected
    other = leased("worker-2", A, 2, 0, GOOD.gradients)
    fence = fence_of(shard.client, worker="worker-2")
    result, _ = shard.client.push_pull(fence, other, whole(PLAN))
    assert result.outcome == "already_applied"
    assert result.receipt == receipt_of(AUTHORITY.keys.grant, "worker-2", 1, A, 2, 0, skipped)


def test_a_staged_attempt_is_vouched_for(sync: Shard) -> None:
    expected = receipt_of(AUTHORITY.keys.grant, "worker-1", 1, A, 1, 0, False)
    assert sync.client.push(fence_of(sync.client), GOOD).receipt == expected


def test_a_shard_vouches_for_what_it_holds_and_not_for_what_is_sent_again(sync: Shard) -> None:
    """Otherwise a batch could be skipped and reported as trained."""
    fence = fence_of(sync.client)
    expected = receipt_of(AUTHORITY.keys.grant, "worker-1", 1, A, 1, 0, True)
    assert sync.client.push(fence, leased("worker-1", A, 1, 0, None)).receipt == expected
    assert sync.client.push(fence, GOOD).receipt == expected


# -- decisions -------------------------------------------------------------------------------


def decision(*snapshots: str) -> types.Decision:
    return types.Decision(
        generation=1,
        round=0,
        attempts=[types.Attempt(batch=to_batch(A), attempt=1)],
        snapshots=[types.SnapshotOrder(name=name, keep=True, write=True) for name in snapshots],
    )


def by_other(message: types.Decision) -> types.SignedDecision:
    proof = OTHER.sign(message.SerializeToString())
    return types.SignedDecision(decision=proof.decision, signature=proof.signature)


def unsigned(message: types.Decision) -> types.SignedDecision:
    return types.SignedDecision(decision=message.SerializeToString())


def of_an_empty_round(message: types.Decision) -> types.SignedDecision:
    good = signed(types.Decision(generation=1, round=0))
    return types.SignedDecision(decision=message.SerializeToString(), signature=good.signature)


@pytest.mark.parametrize("forged", [by_other, unsigned, of_an_empty_round])
def test_a_made_up_decision_moves_no_round_and_writes_nothing(
    sync: Shard, forged: Callable[[types.Decision], types.SignedDecision]
) -> None:
    client = sync.client
    assert client.push(fence_of(client), GOOD).outcome == "staged"
    message = forged(decision("step-1"))
    sync.denied("PS306", lambda: client.pull(fence_of(client), 1, whole(PLAN), message))
    assert sync.engine.report().staged_now == 1
    info = client.pull(fence_of(client), 1, whole(PLAN), signed(decision("step-1")))
    assert info.version == 1
    assert set(sync.sink.snapshots) == {"step-1"}


# -- another generation ----------------------------------------------------------------------


def test_earlier_credentials_are_void_after_a_restart_of_the_coordinator(
    shard: Shard,
) -> None:
    shard.engine.commands.begin(Begin(2, 1, keep=True, keys=OTHER.keys))
    client = shard.client
    again = OTHER.open_session("worker-1", "")
    push = leased("worker-1", A, 1, 0, GOOD.gradients, generation=2)
    with pytest.raises(AccessDenied) as caught:
        client.pull(fence_of(client, 2), None, whole(PLAN))
    assert caught.value.code == "PS309"
    with pytest.raises(AccessDenied) as caught:
        client.push(client.fence(2, 1, again), push)
    assert caught.value.code == "PS305"
    good = replace(push, grant=OTHER.grant("worker-1", 2, Attempt(A, 1)))
    assert client.push(client.fence(2, 1, again), good).outcome == "applied"
