"""Credentials of a coordinator count for its own shards only, and it verifies reports."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from coordinator.core.work import Report
from coordinator.job.authority import Authority
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt
from psrpc.core.errors import AccessDenied
from psrpc.security.signatures import (
    SessionIdentity,
    check_decision,
    check_grant,
    read_session,
    receipt_of,
)

AUTHORITY = Authority(Random(1).randbytes)
BATCH = BatchId(0, 4, 4)
SHARDS = 2


def receipts(
    *skipped: bool,
    worker: str = "worker-1",
    generation: int = 2,
    batch: BatchId = BATCH,
    attempt: int = 7,
    shift: int = 0,
    authority: Authority = AUTHORITY,
) -> tuple[bytes, ...]:
    """Of all shards, each with or without a gradient; ``shift`` gives them another place."""
    return tuple(
        receipt_of(
            authority.keys.grant, worker, generation, batch, attempt, (shard + shift) % SHARDS, one
        )
        for shard, one in enumerate(skipped)
    )


def vouched(report: Report) -> Report:
    return AUTHORITY.vouched("worker-1", 2, report, SHARDS)


DONE = Report(BATCH, 7, loss=0.5, receipts=receipts(False, False))


def test_credentials_pass_where_the_keys_are() -> None:
    verify, grant = AUTHORITY.keys.verify, AUTHORITY.keys.grant
    assert read_session(verify, AUTHORITY.open_session("w", "c")) == SessionIdentity("w", "c")
    check_decision(verify, AUTHORITY.sign(b"anything"))
    check_grant(grant, "w", 2, BATCH, 7, AUTHORITY.grant("w", 2, Attempt(BATCH, 7)))


def test_each_decision_has_its_own_signature() -> None:
    for decision in (b"first", b"second", b"second", b"first"):
        signed = AUTHORITY.sign(decision)
        assert signed.decision == decision
        check_decision(AUTHORITY.keys.verify, signed)


def test_a_coordinator_that_is_started_again_has_other_keys() -> None:
    again = Authority()
    with pytest.raises(AccessDenied):
        read_session(again.keys.verify, AUTHORITY.open_session("w", ""))
    assert again.keys.grant != AUTHORITY.keys.grant


def test_a_report_that_all_shards_vouch_for_is_as_they_have_it() -> None:
    assert vouched(DONE) == DONE
    assert vouched(replace(DONE, skipped=True)) == DONE, "they have a gradient"


@pytest.mark.parametrize("has", [(True, True), (True, False), (False, True)])
def test_a_batch_that_a_shard_skipped_is_skipped_despite_another_report(
    has: tuple[bool, ...],
) -> None:
    found = vouched(replace(DONE, receipts=receipts(*has)))
    assert found.skipped
    assert (found.batch, found.attempt) == (BATCH, 7)


@pytest.mark.parametrize(
    "others",
    [
        (),
        receipts(False),
        (b"", b""),
        (receipts(False, False)[0], b""),
        receipts(False, False, shift=1),
        receipts(False, False)[:1] * 2,
        receipts(False, False, worker="worker-2"),
        receipts(False, False, generation=1),
        receipts(False, False, attempt=8),
        receipts(False, False, batch=BatchId(0, 8, 4)),
        receipts(False, False, authority=Authority(Random(2).randbytes)),
        (AUTHORITY.grant("worker-1", 2, Attempt(BATCH, 7)),) * 2,
    ],
)
def test_a_report_that_a_shard_does_not_vouch_for_is_denied(others: tuple[bytes, ...]) -> None:
    for skipped in (False, True):
        with pytest.raises(AccessDenied, match=r"shard [01] has not vouched for it") as caught:
            vouched(replace(DONE, receipts=others, skipped=skipped))
        assert caught.value.code == "PS308"


def test_a_batch_that_was_too_stale_is_in_no_shard_and_needs_no_receipt() -> None:
    stale = replace(DONE, too_stale=True, receipts=())
    assert vouched(stale) == stale
