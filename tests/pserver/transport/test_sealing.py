"""The published vectors of docs/sealing.md, by a second implementation and by ours."""

from __future__ import annotations

import hmac
import re
import socket
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from pserver.transport import byte_stream
from pserver.transport.byte_stream import SealedStream
from pserver.transport.data_keys import data_keys, following_key

PAGE = Path(__file__).resolve().parents[3] / "docs" / "sealing.md"

VECTORS = {
    name: bytes.fromhex(text)
    for name, text in re.findall(r"^(\w+) += ([0-9a-f]+)$", PAGE.read_text(), re.MULTILINE)
}
"""By name, as the page has them."""


def hkdf(secret: bytes, info: bytes, nbytes: int) -> bytes:
    """RFC 5869 with SHA-256 and no salt."""
    key = hmac.digest(bytes(32), secret, "sha256")
    block, made, count = b"", b"", 0
    while len(made) < nbytes:
        count += 1
        block = hmac.digest(key, block + info + bytes([count]), "sha256")
        made += block
    return made[:nbytes]


def record(key: bytes, number: int, plaintext: bytes) -> bytes:
    """The sealed record, as it travels."""
    length = len(plaintext).to_bytes(4, "little")
    return length + AESGCM(key).encrypt(number.to_bytes(12, "little"), plaintext, length)


def computed() -> dict[str, bytes]:
    """The vectors, without a line of ours."""
    secret = bytes(range(32))
    made = hkdf(secret, b"psrpc data connection", 128)
    ticket, proof, to_shard, to_worker = (made[i : i + 32] for i in range(0, 128, 32))
    following = hkdf(to_shard, b"psrpc data connection, following key", 32)
    first, second = b"a gradient", bytes(range(40))
    return {
        "secret": secret,
        "ticket": ticket,
        "proof": proof,
        "to_shard": to_shard,
        "to_worker": to_worker,
        "following_key": following,
        "plaintext_0": first,
        "record_0": record(to_shard, 0, first),
        "plaintext_1": second,
        "record_1": record(to_shard, 1, second),
        "plaintext_following": first,
        "record_following": record(following, 0, first),
        "answer_plaintext_0": b"parameters",
        "answer_0": record(to_worker, 0, b"parameters"),
    }


def test_the_page_has_what_a_second_implementation_computes() -> None:
    assert computed() == VECTORS


def test_ticket_proof_and_keys_are_those_of_the_page() -> None:
    keys = data_keys(VECTORS["secret"])
    assert (keys.ticket, keys.proof) == (VECTORS["ticket"], VECTORS["proof"])
    assert keys.of_worker == (VECTORS["to_shard"], VECTORS["to_worker"])
    assert keys.of_shard == (VECTORS["to_worker"], VECTORS["to_shard"])
    assert following_key(VECTORS["to_shard"]) == VECTORS["following_key"]


RECORDS = ("0", "1", "following")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key seals two records instead of 2^18."""
    monkeypatch.setattr(byte_stream, "RECORDS_PER_KEY", 2)


@pytest.mark.usefixtures("short")
def test_records_are_sealed_as_on_the_page() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = SealedStream(ours, *data_keys(VECTORS["secret"]).of_worker)
        for name in RECORDS:
            expected = VECTORS[f"record_{name}"]
            worker.send([memoryview(VECTORS[f"plaintext_{name}"])])
            assert theirs.recv(len(expected), socket.MSG_WAITALL) == expected
        theirs.sendall(VECTORS["answer_0"])
        assert filled(worker, len(VECTORS["answer_plaintext_0"])) == VECTORS["answer_plaintext_0"]


@pytest.mark.usefixtures("short")
def test_records_of_the_page_are_opened() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        shard = SealedStream(ours, *data_keys(VECTORS["secret"]).of_shard)
        for name in RECORDS:
            theirs.sendall(VECTORS[f"record_{name}"])
            plaintext = VECTORS[f"plaintext_{name}"]
            assert filled(shard, len(plaintext)) == plaintext
        expected = VECTORS["answer_0"]
        shard.send([memoryview(VECTORS["answer_plaintext_0"])])
        assert theirs.recv(len(expected), socket.MSG_WAITALL) == expected


@pytest.mark.parametrize("place", [0, 4, -1])
def test_a_record_that_was_changed_is_refused(place: int) -> None:
    """Its length, which stays plausible, its ciphertext, or its tag."""
    sealed = bytearray(VECTORS["record_1"])
    sealed[place] ^= 1
    ours, theirs = socket.socketpair()
    with ours, theirs:
        shard = SealedStream(ours, *data_keys(VECTORS["secret"]).of_shard)
        theirs.sendall(sealed + bytes(1))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionAbortedError):
            filled(shard, 40)


def filled(stream: SealedStream, nbytes: int) -> bytes:
    """The next bytes of the other side."""
    into = bytearray(nbytes)
    assert stream.fill(memoryview(into)) == nbytes
    return bytes(into)
