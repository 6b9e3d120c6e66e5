"""Sessions, grants, receipts and signed decisions: only what was issued passes."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from coordinator.job.authority import Authority
from psrpc.core.batch import BatchId
from psrpc.core.commands import KEY_BYTES, Attempt, Keys
from psrpc.core.errors import AccessDenied, InvalidArgument
from psrpc.security.signatures import (
    DECISION,
    GRANT_BYTES,
    INITIALIZE,
    MAX_SESSION_BYTES,
    SESSION,
    SIGNATURE_BYTES,
    SessionIdentity,
    SignedDecision,
    check_decision,
    check_grant,
    grant_of,
    read_session,
    receipt_of,
    receipts_of,
)
from psrpc.v1 import types_pb2 as types

AUTHORITY = Authority(Random(1).randbytes)
OTHER = Authority(Random(2).randbytes)
VERIFY, GRANT = AUTHORITY.keys.verify, AUTHORITY.keys.grant
BATCH = BatchId(1, 8, 4)
TOKEN = AUTHORITY.open_session("worker-1", "worker")
SIGNED = AUTHORITY.sign(types.Decision(generation=2, round=5).SerializeToString())

CASE: dict[str, Any] = {"worker": "worker-1", "generation": 2, "batch": BATCH, "attempt": 7}
ANOTHER: list[dict[str, Any]] = [
    {"worker": "worker-2"},
    {"worker": ""},
    {"generation": 3},
    {"batch": BatchId(2, 8, 4)},
    {"batch": BatchId(1, 9, 4)},
    {"batch": BatchId(1, 8, 3)},
    {"attempt": 8},
]


def flips(data: bytes, most: int = 128) -> list[bytes]:
    """``data`` with one bit changed: every bit, or ``most`` of them, the same each time."""
    bits = range(8 * len(data))
    chosen = bits if len(bits) <= most else Random(0).sample(bits, most)
    return [
        data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]
        for bit in chosen
    ]


def denied(code: str, call: Any, *args: Any) -> str:
    """Why."""
    with pytest.raises(AccessDenied) as caught:
        call(*args)
    assert caught.value.code == code
    return str(caught.value)


# -- sessions --------------------------------------------------------------------------------


@pytest.mark.parametrize("certificate", ["", "worker", "c" * 64])
def test_a_session_names_its_worker_and_certificate(certificate: str) -> None:
    token = AUTHORITY.open_session("worker-1", certificate)
    for _ in range(2):
        assert read_session(VERIFY, token) == SessionIdentity("worker-1", certificate)


def test_no_two_sessions_are_alike() -> None:
    assert len({AUTHORITY.open_session("worker-1", "") for _ in range(8)}) == 8


def test_a_session_with_any_other_bit_is_none() -> None:
    for token in flips(TOKEN):
        denied("PS309", read_session, VERIFY, token)


@pytest.mark.parametrize("length", [1, SIGNATURE_BYTES - 1, SIGNATURE_BYTES, len(TOKEN) - 1])
def test_a_part_of_a_session_is_none(length: int) -> None:
    denied("PS309", read_session, VERIFY, TOKEN[:length])
    denied("PS309", read_session, VERIFY, TOKEN + TOKEN[:length])


def test_a_session_of_another_coordinator_is_none() -> None:
    denied("PS309", read_session, VERIFY, OTHER.open_session("worker-1", "worker"))
    assert read_session(OTHER.keys.verify, OTHER.open_session("w", "")) == SessionIdentity("w", "")
    denied("PS309", read_session, OTHER.keys.verify, TOKEN)


def test_no_session_and_one_that_is_too_long_are_named() -> None:
    assert "names no session" in denied("PS309", read_session, VERIFY, b"")
    long = TOKEN + bytes(MAX_SESSION_BYTES)
    assert f"has {len(long)} bytes" in denied("PS309", read_session, VERIFY, long)


def test_a_signature_serves_one_purpose_only() -> None:
    body, signature = TOKEN[SIGNATURE_BYTES:], TOKEN[:SIGNATURE_BYTES]
    denied("PS306", check_decision, VERIFY, SignedDecision(body, signature))
    denied("PS309", read_session, VERIFY, SIGNED.signature + SIGNED.decision)
    # Nor with the other's purpose as a part of what is signed.
    forged = AUTHORITY.sign(SESSION + body)
    denied("PS309", read_session, VERIFY, forged.signature + body)
    assert not SESSION.startswith(DECISION)
    assert not DECISION.startswith(SESSION)


# -- decisions -------------------------------------------------------------------------------


def test_a_signed_decision_passes_and_passes_again() -> None:
    for _ in range(2):
        check_decision(VERIFY, SIGNED)


def test_a_decision_with_any_other_bit_is_refused() -> None:
    for signature in flips(SIGNED.signature, 64):
        denied("PS306", check_decision, VERIFY, replace(SIGNED, signature=signature))
    for decision in flips(SIGNED.decision):
        denied("PS306", check_decision, VERIFY, replace(SIGNED, decision=decision))


@pytest.mark.parametrize("signature", [b"", SIGNED.signature[:-1], SIGNED.signature + b"\0"])
def test_a_signature_of_another_length_is_none(signature: bytes) -> None:
    denied("PS306", check_decision, VERIFY, replace(SIGNED, signature=signature))


def test_a_decision_of_another_coordinator_is_refused() -> None:
    denied("PS306", check_decision, VERIFY, OTHER.sign(SIGNED.decision))
    denied("PS306", check_decision, OTHER.keys.verify, SIGNED)


# -- grants and receipts ---------------------------------------------------------------------


def test_a_grant_is_for_one_attempt_of_one_worker() -> None:
    grant = AUTHORITY.grant("worker-1", 2, Attempt(BATCH, 7))
    assert len(grant) == GRANT_BYTES
    check_grant(GRANT, **CASE, grant=grant)
    for change in ANOTHER:
        with pytest.raises(AccessDenied) as caught:
            check_grant(GRANT, **(CASE | change), grant=grant)
        assert caught.value.code == "PS305", change
    with pytest.raises(AccessDenied):
        check_grant(OTHER.keys.grant, **CASE, grant=grant)


def test_a_grant_with_any_other_bit_is_refused() -> None:
    grant = grant_of(GRANT, **CASE)
    for other in (b"", grant[:-1], grant + b"\0", *flips(grant)):
        with pytest.raises(AccessDenied) as caught:
            check_grant(GRANT, **CASE, grant=other)
        assert caught.value.code == "PS305"


def test_a_denied_grant_says_what_was_sent() -> None:
    said = denied("PS305", check_grant, GRANT, "worker-1", 2, BATCH, 7, b"")
    assert said.startswith("worker-1 sends attempt 7 of epoch 2 positions 8..11")
    said = denied("PS305", check_grant, GRANT, "worker-1", 2, INITIALIZE, 0, b"")
    assert said.startswith("worker-1 sends first values")


def test_the_grant_to_initialize_is_no_batchs_and_no_other_workers() -> None:
    grant = AUTHORITY.grant_initialize("worker-1", 2)
    check_grant(GRANT, "worker-1", 2, INITIALIZE, 0, grant)
    denied("PS305", check_grant, GRANT, "worker-2", 2, INITIALIZE, 0, grant)
    denied("PS305", check_grant, GRANT, "worker-1", 3, INITIALIZE, 0, grant)
    denied("PS305", check_grant, GRANT, "worker-1", 2, BATCH, 7, grant)


def test_a_receipt_is_of_one_shard_and_says_whether_it_has_a_gradient() -> None:
    receipts = {
        receipt_of(GRANT, **(CASE | change), shard=shard, skipped=skipped)
        for change in ({}, *ANOTHER)
        for shard in (0, 1)
        for skipped in (False, True)
    }
    assert len(receipts) == 4 * (1 + len(ANOTHER))
    assert grant_of(GRANT, **CASE) not in receipts
    assert {len(receipt) for receipt in receipts} == {GRANT_BYTES}


@pytest.mark.parametrize("skipped", [False, True])
def test_receipts_of_all_shards_are_those_of_each(skipped: bool) -> None:
    joined = receipts_of(GRANT, **CASE, shards=100, skipped=skipped)
    each = [receipt_of(GRANT, **CASE, shard=shard, skipped=skipped) for shard in range(100)]
    assert joined == b"".join(each)


# -- keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verify", "grant"), [(0, 0), (0, 32), (32, 0), (31, 32), (32, 33)])
def test_keys_of_another_length_are_none(verify: int, grant: int) -> None:
    with pytest.raises(InvalidArgument, match=f"keys of {verify} and {grant} bytes; expected 32"):
        Keys(bytes(verify), bytes(grant))


def test_keys_differ_between_coordinators() -> None:
    found = [AUTHORITY.keys, OTHER.keys, Authority().keys, Authority().keys]
    assert len({(key.verify, key.grant) for key in found}) == 4
    assert all(len(key.verify) == len(key.grant) == KEY_BYTES for key in found)
