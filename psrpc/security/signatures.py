"""Proofs that the coordinator issues and shards check: sessions, grants and signed decisions.

A worker runs its user's code, so a shard trusts nothing that a worker says about itself or others.
Data that a worker passes on from the coordinator has a proof that the worker cannot make:

* a *session* says which worker calls, and with which certificate. Ed25519 signature, checked once;
* a *grant* says that an attempt was leased to that worker in this generation. BLAKE2b with a key
  that coordinator and shards share, because a grant is checked for every push: that takes 2
  microseconds, and a signature 200;
* a *receipt* says that a shard has the attempt, and whether with a gradient or as skipped, so that
  a worker cannot report an attempt that it did not push. Made with the same key, and checked by the
  coordinator, or by the other shards if the round was decided ahead. The receipts of all shards are
  pieces of one output of SHAKE128, so the coordinator makes a hundred in 5 microseconds;
* a *signed decision* is a round as the coordinator stored it. Ed25519 signature, checked once per
  round.

Each coordinator process makes new keys. It sends them to shards in their command streams, with the
order to begin a generation. Pure.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import DecodeError

from psrpc.core.batch import BatchId
from psrpc.core.commands import WorkerClock
from psrpc.core.errors import AccessDenied
from psrpc.v1 import types_pb2 as types

SESSION = b"psrpc.v1 session\0"
DECISION = b"psrpc.v1 decision\0"
"""Signed bytes begin with their purpose, so that a signature cannot be used for another purpose.
Load-bearing, as are the sizes and ``_GRANTED``, because clients in other languages pass these bytes
on."""

SIGNATURE_BYTES = 64
GRANT_BYTES = 16
NONCE_BYTES = 16
SECRET_BYTES = 32

MAX_SESSION_BYTES = 255
"""Maximum size of a session token, which contains the name of a worker and the common name of a
certificate. X.509 limits the latter to 64 characters."""

_GRANTED = struct.Struct("<QQIQI")
"""Generation, attempt, and the batch's epoch, first and count. The worker's name follows."""

_GRANT = b"psrpc.v1 grant"
_CLOCKED = b"psrpc.v1 clock"

_CLOCK = struct.Struct("<QQQ")
"""Generation, entry and steps; the worker's name follows."""

_RECEIPT = {False: b"psrpc.v1 receipt, applied", True: b"psrpc.v1 receipt, skipped"}


@dataclass(frozen=True, slots=True)
class SessionIdentity:
    """A worker's registration: the name that the coordinator gave it, and the common name of the
    certificate that it registered with (empty without certificates)."""

    worker: str
    certificate: str


@dataclass(frozen=True, slots=True)
class SignedDecision:
    """See the message of the same name."""

    decision: bytes
    signature: bytes


INITIALIZE = BatchId(0, 0, 0)
"""The grant to initialize shards is that of this empty batch and attempt 0, which no lease has."""


def grant_of(key: bytes, worker: str, generation: int, batch: BatchId, attempt: int) -> bytes:
    """Returns the proof that ``attempt`` of ``batch`` was leased to ``worker`` in
    ``generation``."""
    return _mac(key, _GRANT, _granted(worker, generation, batch, attempt))


def receipt_of(
    key: bytes,
    worker: str,
    generation: int,
    batch: BatchId,
    attempt: int,
    shard: int,
    skipped: bool,
) -> bytes:
    """Returns the proof that ``shard`` has this attempt of ``worker``, either as ``skipped`` or
    with a gradient."""
    stretch = receipts_of(key, worker, generation, batch, attempt, shard + 1, skipped)
    return stretch[-GRANT_BYTES:]


def receipts_of(
    key: bytes,
    worker: str,
    generation: int,
    batch: BatchId,
    attempt: int,
    shards: int,
    skipped: bool,
) -> bytes:
    """Returns the receipts of the first ``shards`` shards, concatenated."""
    # SHAKE is a sponge, so a key in front of the message authenticates it. All keys have the same
    # length, so the boundary between key and message is unambiguous.
    message = key + _RECEIPT[skipped] + _granted(worker, generation, batch, attempt)
    return hashlib.shake_128(message).digest(GRANT_BYTES * shards)


def clock_proof(key: bytes, generation: int, clock: WorkerClock) -> bytes:
    """Returns the proof that the coordinator has others wait for ``clock.worker`` from this clock
    on."""
    packed = _CLOCK.pack(generation, clock.entry, clock.steps)
    return _mac(key, _CLOCKED, packed + clock.worker.encode())


def check_clock(key: bytes, generation: int, clock: WorkerClock) -> None:
    """Checks the proof of a leased clock. Raises AccessDenied."""
    if not hmac.compare_digest(clock.proof, clock_proof(key, generation, clock)):
        raise AccessDenied(
            f"{clock.worker} says that others wait for it since change {clock.entry}, at step "
            f"{clock.steps}; that was not leased to it in generation {generation}",
            code="PS305",
        )


def check_grant(
    key: bytes, worker: str, generation: int, batch: BatchId, attempt: int, grant: bytes
) -> None:
    """Checks the grant of an attempt of ``worker``. Raises AccessDenied."""
    what = f"attempt {attempt} of {batch}" if batch != INITIALIZE else "first values"
    if not hmac.compare_digest(grant, grant_of(key, worker, generation, batch, attempt)):
        raise AccessDenied(
            f"{worker} sends {what}; that was not leased to it in generation {generation}",
            code="PS305",
        )


def check_receipts(
    key: bytes,
    worker: str,
    generation: int,
    batch: BatchId,
    attempt: int,
    receipts: Sequence[bytes],
    shards: int,
) -> bool:
    """Checks the receipts of all shards for an attempt; returns whether it was skipped.

    Raises:
        AccessDenied: the receipt of a shard is missing or wrong.
    """
    applied = receipts_of(key, worker, generation, batch, attempt, shards, skipped=False)
    if hmac.compare_digest(b"".join(receipts[:shards]), applied):
        return False
    skipped = receipts_of(key, worker, generation, batch, attempt, shards, skipped=True)
    for shard in range(shards):
        receipt = receipts[shard] if shard < len(receipts) else b""
        piece = slice(shard * GRANT_BYTES, (shard + 1) * GRANT_BYTES)
        if not hmac.compare_digest(receipt, applied[piece]) and not hmac.compare_digest(
            receipt, skipped[piece]
        ):
            raise AccessDenied(
                f"{worker} reports attempt {attempt} of {batch} as done, and shard {shard} has "
                "not vouched for it",
                code="PS308",
            )
    return True


def read_session(verify: bytes, token: bytes) -> SessionIdentity:
    """Returns the session in ``token``. Checks each token only once and then remembers it.

    Raises:
        AccessDenied: ``token`` was not issued by the coordinator whose public key is ``verify``.
    """
    if not token:
        raise AccessDenied("the call names no session; a worker registers first", code="PS309")
    if len(token) > MAX_SESSION_BYTES:
        raise AccessDenied(
            f"the session has {len(token)} bytes; expected at most {MAX_SESSION_BYTES}",
            code="PS309",
        )
    return _read_session(verify, token)


def check_decision(verify: bytes, signed: SignedDecision) -> None:
    """Checks the coordinator's signature of a decision, once for each decision. Raises
    AccessDenied."""
    if len(signed.signature) != SIGNATURE_BYTES or not _is_decision(
        verify, signed.decision, signed.signature
    ):
        raise AccessDenied("the decision was not signed by this job's coordinator", code="PS306")


def session_body(session: SessionIdentity, nonce: bytes) -> bytes:
    """Returns the signed bytes of a session, without the prefix :data:`SESSION`. In a token they
    follow the signature."""
    return types.Session(
        worker=session.worker, certificate=session.certificate, nonce=nonce
    ).SerializeToString()


def _granted(worker: str, generation: int, batch: BatchId, attempt: int) -> bytes:
    packed = _GRANTED.pack(generation, attempt, batch.epoch, batch.first, batch.count)
    return packed + worker.encode()


def _mac(key: bytes, purpose: bytes, message: bytes) -> bytes:
    return hashlib.blake2b(message, key=key, person=purpose, digest_size=GRANT_BYTES).digest()


@lru_cache(maxsize=4096)
def _read_session(verify: bytes, token: bytes) -> SessionIdentity:
    signature, body = token[:SIGNATURE_BYTES], token[SIGNATURE_BYTES:]
    if not _verifies(verify, signature, SESSION + body):
        raise AccessDenied(
            "the session is not one that this job's coordinator opened", code="PS309"
        )
    try:
        session = types.Session.FromString(body)
    except DecodeError:
        raise AssertionError("the coordinator signs sessions alone with this purpose") from None
    return SessionIdentity(session.worker, session.certificate)


@lru_cache(maxsize=8)
def _is_decision(verify: bytes, decision: bytes, signature: bytes) -> bool:
    """Checks a decision and remembers the result, since all workers of a round bring the same
    decision."""
    return _verifies(verify, signature, DECISION + decision)


def _verifies(verify: bytes, signature: bytes, signed: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(verify).verify(signature, signed)
    except InvalidSignature:
        return False
    return True
