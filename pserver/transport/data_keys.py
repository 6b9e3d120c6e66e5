"""What worker and shard make of the secret that a call was given for its data connection."""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SECRET_BYTES = 32

TICKET_BYTES = 32
"""Of what the worker sends first. Load-bearing, as is all that follows here."""

PROOF_BYTES = 32
"""Of what the shard answers to it."""

KEY_BYTES = 32
"""Of AES-256."""

_PURPOSE = b"psrpc data connection"


@dataclass(frozen=True)
class DataKeys:
    """Four values of which none tells anything about another (HKDF, RFC 5869).

    Attributes:
        ticket: by which the shard knows whose connection it is; anybody on the way may read it.
        proof: what only a shard can answer that knows the secret already.
        to_shard: key for what the worker sends.
        to_worker: key for what the shard sends.
    """

    ticket: bytes
    proof: bytes
    to_shard: bytes = field(repr=False)
    to_worker: bytes = field(repr=False)

    @property
    def of_worker(self) -> tuple[bytes, bytes]:
        """What the worker sends with, and what it receives with."""
        return self.to_shard, self.to_worker

    @property
    def of_shard(self) -> tuple[bytes, bytes]:
        """The same for the shard."""
        return self.to_worker, self.to_shard


def data_keys(secret: bytes) -> DataKeys:
    """``secret`` is random, :data:`SECRET_BYTES` long, and good for one connection."""
    sizes = (TICKET_BYTES, PROOF_BYTES, KEY_BYTES, KEY_BYTES)
    made = HKDF(SHA256(), sum(sizes), None, _PURPOSE).derive(secret)
    parts = []
    for size in sizes:
        parts.append(made[:size])
        made = made[size:]
    return DataKeys(*parts)


def following_key(key: bytes) -> bytes:
    """What takes the place of a key that has sealed enough; it does not tell the one before."""
    return HKDF(SHA256(), KEY_BYTES, None, _PURPOSE + b", following key").derive(key)
