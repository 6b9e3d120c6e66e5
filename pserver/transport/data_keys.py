"""Derives the keys of a data connection from the secret that the shard sends in the call."""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SECRET_BYTES = 32

TICKET_BYTES = 32
"""Size of the ticket that the worker sends first. Load-bearing, as are all sizes below."""

PROOF_BYTES = 32
"""Size of the shard's answer to the ticket."""

KEY_BYTES = 32
"""Size of an AES-256 key."""

_PURPOSE = b"psrpc data connection"


@dataclass(frozen=True)
class DataKeys:
    """Four values derived from one secret. None of them reveals anything about another (HKDF, RFC
    5869).

    Attributes:
        ticket: tells the shard which call the connection belongs to; third parties may read it.
        proof: shows the worker that the shard knows the secret.
        to_shard: key for the worker's data.
        to_worker: key for the shard's data.
    """

    ticket: bytes
    proof: bytes
    to_shard: bytes = field(repr=False)
    to_worker: bytes = field(repr=False)

    @property
    def of_worker(self) -> tuple[bytes, bytes]:
        """Keys with which the worker sends and receives."""
        return self.to_shard, self.to_worker

    @property
    def of_shard(self) -> tuple[bytes, bytes]:
        """Keys with which the shard sends and receives."""
        return self.to_worker, self.to_shard


def data_keys(secret: bytes) -> DataKeys:
    """Derives the keys from ``secret``: random, :data:`SECRET_BYTES` long, used for one
    connection."""
    sizes = (TICKET_BYTES, PROOF_BYTES, KEY_BYTES, KEY_BYTES)
    made = HKDF(SHA256(), sum(sizes), None, _PURPOSE).derive(secret)
    parts = []
    for size in sizes:
        parts.append(made[:size])
        made = made[size:]
    return DataKeys(*parts)


def following_key(key: bytes) -> bytes:
    """Derives the successor of a key that has sealed enough records. The successor does not reveal
    ``key``."""
    return HKDF(SHA256(), KEY_BYTES, None, _PURPOSE + b", following key").derive(key)
