"""Bytes arrive as they were sent; bytes changed on the way do not arrive."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from pserver.transport import byte_stream
from pserver.transport.byte_stream import RECORD_BYTES, ByteStream, PlainStream, SealedStream
from pserver.transport.data_keys import following_key

ONE, OTHER = b"1" * 32, b"2" * 32

Pair = tuple[socket.socket, socket.socket]


def tcp_pair() -> Pair:
    """The two ends of a connection within this host."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    return near, far


@pytest.fixture
def sockets() -> Iterator[Pair]:
    near, far = tcp_pair()
    with near, far:
        yield near, far


def streams(sockets: Pair, *, sealed: bool) -> tuple[ByteStream, ByteStream]:
    near, far = sockets
    if not sealed:
        return PlainStream(near, near=True), PlainStream(far, near=True)
    return SealedStream(near, ONE, OTHER, near=True), SealedStream(far, OTHER, ONE, near=True)


def pieces(sizes: list[int]) -> list[bytes]:
    random = np.random.default_rng(len(sizes))
    return [random.bytes(size) for size in sizes]


def carry(near: ByteStream, far: ByteStream, sent: list[bytes], sizes: list[int]) -> list[bytes]:
    """Bytes that ``far`` receives, in parts of ``sizes``."""
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(near.send, [memoryview(piece) for piece in sent])
        came = []
        for size in sizes:
            into = bytearray(size)
            assert far.fill(memoryview(into)) == size
            came.append(bytes(into))
        sending.result()
    return came


LONG = [5, 0, 1, 1 << 17, (1 << 17) + 1, RECORD_BYTES, RECORD_BYTES + 1, 3, 3 << 20, *[16384] * 40]


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("cut", ["as sent", "whole", "small first"])
def test_all_arrives_whatever_the_pieces(sockets: Pair, sealed: bool, cut: str) -> None:
    sent = pieces(LONG)
    sizes = {
        "as sent": LONG,
        "whole": [sum(LONG)],
        "small first": [1, 7, 1000, sum(LONG) - 1008],
    }[cut]
    near, far = streams(sockets, sealed=sealed)
    assert b"".join(carry(near, far, sent, sizes)) == b"".join(sent)


@pytest.mark.parametrize("sealed", [False, True])
def test_more_pieces_than_a_system_call_takes(sockets: Pair, sealed: bool) -> None:
    sent = pieces([3] * 2000)
    near, far = streams(sockets, sealed=sealed)
    assert carry(near, far, sent, [3] * 2000) == sent


@given(
    st.lists(st.integers(0, 40), max_size=12),
    st.lists(st.integers(1, 60), max_size=12),
    st.booleans(),
)
@settings(max_examples=60)
def test_any_pieces_arrive_in_any_parts(sent: list[int], asked: list[int], sealed: bool) -> None:
    near, far = tcp_pair()
    with near, far, pytest.MonkeyPatch.context() as patch:
        # Small, so that every way of meeting a border is met.
        patch.setattr(byte_stream, "RECORD_BYTES", 16)
        patch.setattr(byte_stream, "_SHORT_BYTES", 8)
        patch.setattr(byte_stream, "_NEAR_PIECE_BYTES", 20)
        data = b"".join(pieces(sent))
        one, other = streams((near, far), sealed=sealed)
        one.send([memoryview(piece) for piece in pieces(sent)])
        near.shutdown(socket.SHUT_WR)
        came, sizes = b"", iter(asked)
        while True:
            into = bytearray(next(sizes, 7))
            count = other.fill(memoryview(into))
            came += into[:count]
            if count < len(into):
                break
        assert came == data


def least(of: socket.socket) -> int:
    """How many bytes wake who waits for ``of``."""
    return of.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def test_a_record_that_comes_bit_by_bit_is_awaited(sockets: Pair) -> None:
    near, far = sockets
    sent = b"".join(pieces([3 << 20]))
    stream, into = PlainStream(far, near=True), bytearray(3 << 20)
    with ThreadPoolExecutor(1) as threads:
        filling = threads.submit(stream.fill, memoryview(into))
        for start in range(0, len(sent), 70_001):
            near.sendall(sent[start : start + 70_001])
        assert filling.result() == len(sent)
    assert bytes(into) == sent
    assert least(far) > 1
    # Now it must not wait for as many bytes.
    near.sendall(b"short")
    assert stream.fill(memoryview(into)[:5]) == 5
    assert least(far) == 1


def test_between_hosts_the_kernel_keeps_its_window(sockets: Pair) -> None:
    near, far = sockets
    sent = b"".join(pieces([3 << 20]))
    assert carry(PlainStream(near), PlainStream(far), [sent], [len(sent)]) == [sent]
    assert least(far) == 1


@pytest.mark.parametrize("sealed", [False, True])
def test_both_directions_at_once(sockets: Pair, sealed: bool) -> None:
    near, far = streams(sockets, sealed=sealed)
    assert carry(near, far, [b"there"], [5]) == [b"there"]
    assert carry(far, near, [b"back"], [4]) == [b"back"]
    assert carry(near, far, [b"again"], [5]) == [b"again"]


@pytest.mark.parametrize("sealed", [False, True])
def test_the_end_is_no_error_but_it_is_seen(sockets: Pair, sealed: bool) -> None:
    near, far = streams(sockets, sealed=sealed)
    near.send([memoryview(b"all")])
    sockets[0].close()
    into = memoryview(bytearray(5))
    assert far.fill(into) == 3
    assert far.fill(into) == 0


# -- changes on the way ----------------------------------------------------------------------


def recorded(sent: list[bytes]) -> list[bytes]:
    """The records of ``sent``, one each, as they are on the wire."""
    near, far = socket.socketpair()
    with near, far:
        stream = SealedStream(near, ONE, OTHER)
        records = []
        for piece in sent:
            stream.send([memoryview(piece)])
            records.append(far.recv(1 << 16))
    return records


def changed(record: bytes, at: int) -> bytes:
    return record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]


FIRST, SECOND = b"the first record", b"another, longer record"
Attack = Callable[[bytes, bytes], list[bytes]]

ATTACKS: dict[str, Attack] = {
    "a byte of the text changed": lambda one, two: [changed(one, 9), two],
    "the tag changed": lambda one, two: [changed(one, len(one) - 1), two],
    "shortened, with a length that fits": lambda one, two: [
        (len(FIRST) - 1).to_bytes(4, "little") + one[4:-17] + one[-16:],
        two,
    ],
    "in another order": lambda one, two: [two, one],
    "one left out": lambda _one, two: [two],
    "one repeated": lambda one, two: [one, one, two],
    "of no bytes": lambda _one, two: [bytes(4) + bytes(16), two],
    "longer than any": lambda _one, two: [(RECORD_BYTES + 1).to_bytes(4, "little"), two],
    "longest there is": lambda _one, two: [b"\xff" * 4, two],
    "its length cut short": lambda one, _two: [one, b"\x08\x00"],
    "plaintext": lambda one, _two: [one, SECOND + bytes(64)],
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_record_changed_on_its_way_is_refused(sockets: Pair, attack: str) -> None:
    near, far = sockets
    for record in ATTACKS[attack](*recorded([FIRST, SECOND])):
        near.sendall(record)
    near.close()
    stream = SealedStream(far, OTHER, ONE)
    into = memoryview(bytearray(len(FIRST + SECOND)))
    with pytest.raises(ConnectionAbortedError):
        stream.fill(into)


def test_a_record_that_is_cut_short_is_said_to_be(sockets: Pair) -> None:
    near, far = sockets
    one, two = recorded([FIRST, SECOND])
    near.sendall(one + two[:-1])
    near.close()
    stream = SealedStream(far, OTHER, ONE)
    with pytest.raises(ConnectionAbortedError, match="closed within a record"):
        stream.fill(memoryview(bytearray(len(FIRST + SECOND))))


def test_a_record_cannot_be_sent_back_to_its_sender(sockets: Pair) -> None:
    near, far = sockets
    sender = SealedStream(near, ONE, OTHER)
    sender.send([memoryview(FIRST)])
    far.sendall(far.recv(1 << 16))
    with pytest.raises(ConnectionAbortedError, match="record is not authentic"):
        sender.fill(memoryview(bytearray(len(FIRST))))


def test_equal_records_look_different() -> None:
    one, two = recorded([FIRST, FIRST])
    assert one[4:] != two[4:]
    assert FIRST not in one


def test_a_key_seals_so_many_records_and_no_more(
    sockets: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_stream, "RECORDS_PER_KEY", 2)
    keys = []

    def remembered(key: bytes) -> AESGCM:
        keys.append(key)
        return AESGCM(key)

    monkeypatch.setattr(byte_stream, "AESGCM", remembered)
    near, far = streams(sockets, sealed=True)
    del keys[:]
    for number in range(5):
        assert carry(near, far, [b"%d" % number], [1]) == [b"%d" % number]
    second = following_key(ONE)
    assert keys == [second, second, following_key(second), following_key(second)]
    assert len({ONE, *keys}) == 3
