"""Leases and reports lose no field on the wire."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from coordinator.core.work import (
    EvaluationWork,
    InitializationWork,
    MergeWork,
    MetricVariable,
    Round,
    Train,
    Work,
)
from coordinator.job.authority import Authority
from coordinator.rpc.messages import read_report, write_lease
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Decision, Ended, SnapshotOrder, WorkerClock
from psrpc.security.signatures import SignedDecision, check_decision
from psrpc.wire.commands import parse_decision
from tests.coordinator.builders import make_run
from worker.protocol.done import DoneBatch

AUTHORITY = Authority()
RUN = make_run(Path("run"), generation=2)
ATTEMPT = Attempt(BatchId(1, 8, 4), 7)
BESIDE = Attempt(BatchId(1, 16, 4), 9)
AHEAD = Attempt(BatchId(1, 16, 4), 8)
ORDER = SnapshotOrder("step-1", 1, True, True, "checkpoints/.step-1", "checkpoints/step-0", 3)
DECISION = Decision(2, 5, (ATTEMPT, Attempt(BatchId(1, 12, 4), 9)), (ORDER,))


@pytest.mark.parametrize(
    ("kind", "work"),
    [
        ("train", Train((ATTEMPT,), fresh=True, clock=WorkerClock("worker-1", 3, 7))),
        ("round", Round(5, ATTEMPT, DECISION, True, True, AHEAD, (BESIDE,))),
        ("evaluate", EvaluationWork("epoch-1", 1, "step-1", 2, 4)),
        ("merge", MergeWork("epoch-1", (MetricVariable((2,), (1.0, 2.0)),), training=True)),
        ("finished", Ended(True, "why")),
    ],
)
def test_a_lease_says_all_of_its_work(kind: str, work: Work) -> None:
    lease = write_lease(work, "worker-1", RUN, AUTHORITY)
    assert (lease.generation, lease.policy, lease.WhichOneof("work")) == (2, RUN.policy, kind)
    said = {field.name for field, _ in getattr(lease, kind).ListFields()}
    assert said == {field.name for field in dataclasses.fields(work)}


def test_a_lease_comes_with_its_proofs() -> None:
    grant = AUTHORITY.grant("worker-1", 2, ATTEMPT)
    train = write_lease(Train((ATTEMPT,)), "worker-1", RUN, AUTHORITY).train
    assert [attempt.grant for attempt in train.batches] == [grant]
    work = write_lease(Round(5, ATTEMPT, DECISION), "worker-1", RUN, AUTHORITY).round
    assert work.attempt.grant == grant
    ahead = write_lease(Round(5, AHEAD, None, ahead=ATTEMPT), "worker-1", RUN, AUTHORITY).round
    assert ahead.ahead.grant == grant
    signed = SignedDecision(work.decision.decision, work.decision.signature)
    check_decision(AUTHORITY.keys.verify, signed)
    assert parse_decision(signed.decision) == DECISION
    initialize = write_lease(InitializationWork(), "worker-1", RUN, AUTHORITY).initialize
    assert initialize.grant == AUTHORITY.grant_initialize("worker-1", 2)


def test_a_report_of_a_batch() -> None:
    done = DoneBatch(ATTEMPT.batch, 7, 0.5, 3, skipped=True, receipts=(b"0" * 16, b"1" * 16))
    stale = DoneBatch(ATTEMPT.batch, 7, 0.5, 3, too_stale=True)
    bad = DoneBatch(ATTEMPT.batch, 7, 0.5, skipped=True, not_finite="x has a NaN in record 37")
    for each in (done, stale, bad):
        assert dataclasses.asdict(read_report(each.message())) == dataclasses.asdict(each)
