"""What the coordinator says is what shards and workers hear, whole: no field is lost on the way."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coordinator.core.work import (
    Begin,
    Decision,
    Ended,
    EvaluationWork,
    InitializationWork,
    LeasedAttempt,
    MergeWork,
    MetricVariable,
    Revocation,
    Round,
    SnapshotOrder,
    Train,
    Work,
)
from coordinator.job.authority import Authority
from coordinator.rpc.answers import write_begin, write_command, write_lease
from coordinator.rpc.messages import read_report
from pserver.wire import messages as wire
from psrpc.core.batch import BatchId
from psrpc.core.policy import Policy
from psrpc.security.signatures import SignedDecision, check_decision
from psrpc.v1 import types_pb2 as types
from worker.protocol.done import DoneBatch

AUTHORITY = Authority()
ATTEMPT = LeasedAttempt(BatchId(1, 8, 4), 7)
ORDER = SnapshotOrder("step-1", 1, True, True, "checkpoints/.step-1", "checkpoints/step-0", 3)
DECISION = Decision(2, 5, (ATTEMPT, LeasedAttempt(BatchId(1, 12, 4), 9)), (ORDER,))
KEEP = Begin(
    2, 3, True, "", DECISION, Policy(mode="ssp", staleness=4), 40, rate_scale=3.0, warmup_updates=9
)
BEGINS = [
    KEEP,
    dataclasses.replace(KEEP, keep=False, restore="checkpoints/step-1", version=None),
    dataclasses.replace(KEEP, keep=False, decision=None, version=0),
]


def told(value: Any) -> Any:
    """A value as JSON has it; both sides call its parts the same, but for the attempts' number."""
    if isinstance(value, Policy):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        fields = {f.name: told(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"number" if n == "attempt" else n: v for n, v in fields.items()}
    return [told(one) for one in value] if isinstance(value, tuple) else value


def needs_no_default(value: Any) -> None:
    """So that a field which is left out would be seen."""
    for field in dataclasses.fields(value):
        assert getattr(value, field.name) != field.default, field.name


@pytest.mark.parametrize("begin", BEGINS, ids=["keep", "restore", "fresh"])
def test_where_a_shard_is_to_begin(begin: Begin) -> None:
    heard = wire.from_begin(write_begin(begin, AUTHORITY.keys))
    assert heard.keys == AUTHORITY.keys
    said = told(heard)
    del said["keys"]
    assert said == told(begin)


def test_decisions_orders_and_revocations() -> None:
    revocation = Revocation(3, "worker-1", (ATTEMPT,))
    for value in (ORDER, DECISION, revocation):
        needs_no_default(value)
    heard = write_command(DECISION, AUTHORITY.keys).decision
    assert told(wire.from_decision(heard)) == told(DECISION)
    assert told(wire.from_order(write_command(ORDER, AUTHORITY.keys).snapshot)) == told(ORDER)
    assert told(wire.from_revocation(write_command(revocation, AUTHORITY.keys).revocation)) == told(
        revocation
    )


@pytest.mark.parametrize(
    ("kind", "work"),
    [
        ("train", Train((ATTEMPT,), fresh=True)),
        ("round", Round(5, ATTEMPT, DECISION, newest=True)),
        ("evaluate", EvaluationWork("epoch-1", 1, "step-1", 2, 4)),
        ("merge", MergeWork("epoch-1", (MetricVariable((2,), (1.0, 2.0)),), training=True)),
        ("finished", Ended(True, "why")),
    ],
)
def test_a_lease_says_all_of_its_work(kind: str, work: Work) -> None:
    lease = write_lease(work, "worker-1", 2, 3, AUTHORITY)
    assert (lease.generation, lease.policy, lease.WhichOneof("work")) == (2, 3, kind)
    said = {field.name for field, _ in getattr(lease, kind).ListFields()}
    assert said == {field.name for field in dataclasses.fields(work)}


def test_what_is_leased_comes_with_its_proofs() -> None:
    grant = AUTHORITY.grant("worker-1", 2, ATTEMPT)
    train = write_lease(Train((ATTEMPT,)), "worker-1", 2, 3, AUTHORITY).train
    assert [attempt.grant for attempt in train.batches] == [grant]
    work = write_lease(Round(5, ATTEMPT, DECISION), "worker-1", 2, 3, AUTHORITY).round
    assert work.attempt.grant == grant
    signed = SignedDecision(work.decision.decision, work.decision.signature)
    check_decision(AUTHORITY.keys.verify, signed)
    heard = wire.from_decision(types.Decision.FromString(signed.decision))
    assert told(heard) == told(DECISION)
    initialize = write_lease(InitializationWork(), "worker-1", 2, 3, AUTHORITY).initialize
    assert initialize.grant == AUTHORITY.grant_initialize("worker-1", 2)


def test_a_report_of_a_batch() -> None:
    done = DoneBatch(ATTEMPT.batch, 7, 0.5, 3, skipped=True, receipts=(b"0" * 16, b"1" * 16))
    stale = DoneBatch(ATTEMPT.batch, 7, 0.5, 3, too_stale=True)
    bad = DoneBatch(ATTEMPT.batch, 7, 0.5, skipped=True, not_finite="x has a NaN in record 37")
    for each in (done, stale, bad):
        assert told(read_report(each.message())) == told(each)
