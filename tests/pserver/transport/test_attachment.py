"""Attaching shared memory: what a shard takes for a worker's segment, and that nothing outlives its
users."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pserver.transport.attachment import AttachedSegment, attach
from pserver.transport.segment import (
    HANDSHAKE_BYTES,
    SLOTS,
    Offer,
    Segment,
    SegmentUnavailable,
)
from psrpc.core.errors import InvalidArgument
from tests.pserver.kernel_memory import NBYTES, NONCE, SEALS, inode, open_files, users


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create(NBYTES)
    yield segment
    segment.close()


def attached(segment: Segment, slot: int = 0) -> AttachedSegment:
    return attach(segment.offer(slot), NBYTES)


def test_a_view_is_the_memory_that_the_worker_sees(segment: Segment) -> None:
    shard = attached(segment)
    segment.bytes[4096:4100] = (1, 2, 3, 4)
    assert shard.view(4096, 4).tolist() == [1, 2, 3, 4]
    shard.view(NBYTES - 4, 4, alignment=4)[:] = 9
    assert segment.bytes[-4:].tolist() == [9] * 4
    assert shard.view(NBYTES, 0).size == 0


@pytest.mark.parametrize(
    ("offset", "nbytes", "why"),
    [
        (0, 64, "64 bytes at offset 0 of the shared segment; expected them between 4096 and"),
        (4032, 128, "offset 4032"),
        (-64, 64, "offset -64"),
        (NBYTES - 64, 65, "65 bytes at offset 1048512 of .* and 1048576"),
        (NBYTES + 64, 0, "0 bytes at"),
        (1 << 64, 64, "offset 18446744073709551616"),
        (4096, 1 << 64, "18446744073709551616 bytes"),
        (8192, -64, "-64 bytes"),
        (8196, 64, "offset 8196 of the shared segment; expected a multiple of 64"),
    ],
)
def test_a_view_stays_inside(segment: Segment, offset: int, nbytes: int, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        attached(segment).view(offset, nbytes)


def test_where_data_is_only_copied_to_an_element_is_aligned_enough(segment: Segment) -> None:
    shard = attached(segment)
    assert shard.view(8196, 64, alignment=4).size == 64
    with pytest.raises(InvalidArgument, match="expected a multiple of 4"):
        shard.view(8194, 64, alignment=4)


def test_every_shard_attaches_on_its_own(segment: Segment) -> None:
    offers = [segment.offer(slot) for slot in range(SLOTS)]
    proofs = [attach(offer, NBYTES).proof for offer in reversed(offers)][::-1]
    assert [segment.proven(slot, proof) for slot, proof in enumerate(proofs)] == [True] * SLOTS


def test_another_proof_is_none(segment: Segment) -> None:
    shard = attached(segment, 5)
    assert not segment.proven(5, shard.proof[::-1])
    assert not segment.proven(6, shard.proof)


def test_nonce_and_proof_are_good_for_once(segment: Segment) -> None:
    offer = segment.offer(0)
    shard = attach(offer, NBYTES)
    with pytest.raises(SegmentUnavailable, match="does not hold the nonce"):
        attach(offer, NBYTES)
    assert segment.proven(0, shard.proof)
    assert not segment.proven(0, shard.proof)
    with pytest.raises(SegmentUnavailable, match="does not hold the nonce"):
        attach(replace(offer, nonce=shard.proof), NBYTES)


def test_a_newer_offer_ends_an_older_one(segment: Segment) -> None:
    older, newer = segment.offer(0), segment.offer(0)
    with pytest.raises(SegmentUnavailable, match="does not hold the nonce"):
        attach(older, NBYTES)
    attach(newer, NBYTES)


def test_the_memory_goes_with_its_last_array() -> None:
    segment = Segment.create(NBYTES)
    shard = attached(segment)
    number = inode(segment.offer(0))
    kept, view = segment.bytes[8192:8196], shard.view(8192, 4)
    segment.close()
    segment.close()
    del shard
    view[:] = 5
    assert kept.tolist() == [5] * 4
    assert users(number) == {os.getpid()}
    del kept
    assert users(number) == {os.getpid()}
    del view
    assert users(number) == set()


# -- what is refused -------------------------------------------------------------------------


def memfd(nbytes: int = NBYTES, seals: int = SEALS) -> int:
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, NONCE, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def on_disk(directory: Path, *, named: bool) -> int:
    path = directory / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, NBYTES)
    os.pwrite(fd, NONCE, 0)
    if not named:
        path.unlink()
    return fd


REFUSED: dict[str, tuple[Callable[[Path], int], str]] = {
    "unsealed": (lambda _: memfd(seals=0), r"is not sealed against resizing \(seals 0x0\)"),
    "can shrink": (
        lambda _: memfd(seals=fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL),
        "is not sealed against resizing",
    ),
    "seals can be added": (
        lambda _: memfd(seals=fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK),
        "is not sealed against resizing",
    ),
    "read-only": (
        lambda _: memfd(seals=SEALS | fcntl.F_SEAL_WRITE),
        "cannot be mapped: Operation not permitted",
    ),
    "too short": (lambda _: memfd(NBYTES - 4096), "has 1044480 bytes; expected 1048576"),
    "too long": (lambda _: memfd(NBYTES + 4096), "has 1052672 bytes; expected 1048576"),
    "file": (lambda path: on_disk(path, named=True), "is a file that has a name"),
    "file without a name": (lambda path: on_disk(path, named=False), "is not a memfd"),
    "directory": (lambda path: os.open(path, os.O_RDONLY), "is not a regular file"),
    "device": (lambda _: os.open("/dev/zero", os.O_RDWR), "is not a regular file"),
    "socket": (lambda _: socket.socket().detach(), "is not a regular file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_no_segment_is_refused_and_unchanged(case: str, tmp_path: Path) -> None:
    make, why = REFUSED[case]
    fd = make(tmp_path)
    try:
        files = open_files()
        with pytest.raises(SegmentUnavailable, match=rf"^/proc/{os.getpid()}/fd/{fd} {why}"):
            attach(Offer(os.getpid(), fd, NBYTES, 0, NONCE), NBYTES)
        assert open_files() == files
        status = os.fstat(fd)
        maps = Path("/proc/self/maps").read_text()
        assert not re.search(rf" {status.st_ino} +/(memfd:other|.*/file)", maps)
        if stat.S_ISREG(status.st_mode):
            assert os.pread(fd, 64, 0) == NONCE + bytes(32)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pid": 2**32 - 1}, r"cannot be opened \(No such file or directory\): worker and shard"),
        ({"pid": 0}, "cannot be opened"),
        ({"fd": 2**32 - 1}, "cannot be opened"),
        ({"nonce": bytes(32)}, "slot 0 of .* does not hold the nonce"),
        ({"slot": 1}, "slot 1 of .* does not hold the nonce"),
        ({"slot": SLOTS}, "slot 64 of a segment; expected one below 64"),
        ({"slot": -1}, "slot -1"),
        ({"nonce": b""}, "a nonce of 0 bytes; expected 32"),
        ({"nonce": bytes(33)}, "a nonce of 33 bytes; expected 32"),
        ({"nbytes": NBYTES + 1}, "1048577 bytes; expected more than 4096, at most 1048576"),
        ({"nbytes": HANDSHAKE_BYTES}, "4096 bytes; expected more"),
        ({"nbytes": NBYTES - 64}, "has 1048576 bytes; expected 1048512"),
    ],
)
def test_an_offer_of_something_else_is_refused(
    segment: Segment, changes: dict[str, Any], why: str
) -> None:
    offer = segment.offer(0)
    before = segment.bytes.copy()
    files = open_files()
    with pytest.raises(SegmentUnavailable, match=why):
        attach(replace(offer, **changes), NBYTES)
    assert open_files() == files
    np.testing.assert_array_equal(segment.bytes, before)
    # It was the change that was refused.
    attach(offer, NBYTES)


def test_a_descriptor_that_was_closed_is_refused(segment: Segment) -> None:
    offer = segment.offer(0)
    segment.close()
    with pytest.raises(SegmentUnavailable, match="cannot be opened"):
        attach(offer, NBYTES)
