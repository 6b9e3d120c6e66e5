"""A worker's shared memory: its allocation, its seals and what it keeps secret."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from pserver.transport.segment import (
    HANDSHAKE_BYTES,
    SLOT_BYTES,
    SLOTS,
    Segment,
    SegmentUnavailable,
)
from tests.pserver.kernel_memory import NBYTES, file_size_limit, open_files


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create(NBYTES)
    yield segment
    segment.close()


def test_a_new_segment_is_zero_but_for_its_random_slots(segment: Segment) -> None:
    assert segment.bytes.nbytes == NBYTES
    assert not segment.bytes[HANDSHAKE_BYTES:].any()
    slots = segment.bytes[:HANDSHAKE_BYTES].reshape(SLOTS, SLOT_BYTES)[:, :32]
    assert len({bytes(slot) for slot in slots}) == SLOTS
    assert slots.any(axis=1).all()


def test_it_has_no_name_and_no_child_inherits_it(segment: Segment) -> None:
    offer = segment.offer(0)
    assert os.fstat(offer.fd).st_nlink == 0
    assert not os.get_inheritable(offer.fd)


@pytest.mark.parametrize("nbytes", [0, HANDSHAKE_BYTES, NBYTES - 1, NBYTES + 1])
def test_a_segment_cannot_be_resized(segment: Segment, nbytes: int) -> None:
    fd = segment.offer(0).fd
    with pytest.raises(PermissionError):
        os.ftruncate(fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(fd).st_size == NBYTES


def test_its_memory_is_taken_at_once(segment: Segment) -> None:
    assert os.fstat(segment.offer(0).fd).st_blocks * 512 >= NBYTES


def test_more_memory_than_there_is_is_not_even_tried() -> None:
    # The limit is for a program that does try: it would take this machine down.
    with (
        file_size_limit(NBYTES),
        pytest.raises(SegmentUnavailable, match=r"of 1073741824 MiB is needed; \d+ MiB of memory"),
    ):
        Segment.create(1 << 50)


def test_a_segment_that_is_too_large_is_an_error_at_once() -> None:
    files = open_files()
    with (
        file_size_limit(NBYTES // 2),
        pytest.raises(SegmentUnavailable, match="1 MiB could not be made: File too large"),
    ):
        Segment.create(NBYTES)
    assert open_files() == files


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace makes the kernel refuse memory")
def test_memory_that_cannot_be_had_is_an_error_at_once() -> None:
    fault = ["strace", "-f", "-e", "inject=fallocate:error=ENOSPC", "-e", "trace=fallocate"]
    create = f"from pserver.transport.segment import Segment; Segment.create({NBYTES})"
    ended = subprocess.run(
        [*fault, sys.executable, "-c", create], capture_output=True, text=True, check=False
    )
    assert "ENOSPC (No space left on device) (INJECTED)" in ended.stderr
    assert "SegmentUnavailable: a segment of 1 MiB could not be made: No space left" in ended.stderr


def test_a_system_without_memfd_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(SegmentUnavailable, match="linux has no memfd_create"):
        Segment.create(NBYTES)


def test_the_place_of_an_array(segment: Segment) -> None:
    floats = segment.bytes[8192:12288].view(np.float32)
    assert segment.offset_of(segment.bytes) == 0
    assert segment.offset_of(floats) == 8192
    assert segment.offset_of(floats[3:]) == 8204
    assert segment.offset_of(floats[7:7]) == 8192
    assert segment.offset_of(floats[::2]) is None
    assert segment.offset_of(np.zeros(8)) is None
    assert segment.offset_of(np.zeros(0)) is None
