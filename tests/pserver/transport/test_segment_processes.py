"""Shared memory between processes: kills, and segments of other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pserver.transport.attachment import attach
from pserver.transport.segment import Offer, SegmentUnavailable
from tests.pserver.kernel_memory import NBYTES, NONCE, SEALS, inode, users

PEER = """
import json, os, sys
from pserver.transport.attachment import *
from pserver.transport.segment import *
for line in sys.stdin:
    try:
        value = eval(line)
    except SyntaxError:
        value = exec(line)
    print(json.dumps(value), flush=True)
"""


class Peer:
    """Another process, which does as it is told, a line at a time."""

    def __init__(self, program: str = PEER) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def do(self, line: str) -> Any:
        """Runs ``line`` there; its value."""
        assert self._process.stdin
        assert self._process.stdout
        print(line, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def offer(self, slot: int) -> Offer:
        """That of its ``segment``."""
        self.do(f"offer = segment.offer({slot})")
        nonce = bytes.fromhex(self.do("offer.nonce.hex()"))
        return Offer(self.pid, self.do("offer.fd"), NBYTES, slot, nonce)

    def attach(self, offer: Offer) -> None:
        """Makes it its ``segment``."""
        where = (offer.pid, offer.fd, offer.nbytes, offer.slot, offer.nonce)
        self.do(f"segment = attach(Offer(*{where}), {NBYTES})")

    def kill(self) -> None:
        """As SIGKILL does."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def worker() -> Iterator[Peer]:
    peer = Peer()
    peer.do(f"segment = Segment.create({NBYTES})")
    yield peer
    peer.kill()


@pytest.fixture
def shard() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.kill()


@pytest.mark.slow
def test_two_processes_see_the_same_memory(worker: Peer) -> None:
    segment = attach(worker.offer(3), NBYTES)
    assert worker.do(f"segment.proven(3, bytes.fromhex('{segment.proof.hex()}'))") is True
    worker.do("segment.bytes[8192:8196] = (1, 2, 3, 4)")
    view = segment.view(8192, 4)
    assert view.tolist() == [1, 2, 3, 4]
    view[:] = 7
    assert worker.do("segment.bytes[8191:8197].tolist()") == [0, 7, 7, 7, 7, 0]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["worker", "shard"])
def test_killed_processes_leave_nothing_behind(worker: Peer, shard: Peer, first: str) -> None:
    offer = worker.offer(0)
    number = inode(offer)
    shard.attach(offer)
    shard.do("view = segment.view(8192, 4)")
    worker.do("view = segment.bytes[8192:8196]")
    worker.do("view[:] = 6")
    assert users(number) == {worker.pid, shard.pid}
    victim, survivor = (worker, shard) if first == "worker" else (shard, worker)
    victim.kill()
    assert users(number) == {survivor.pid}
    assert survivor.do("view.tolist()") == [6] * 4
    survivor.do("view[:] = 8")
    assert survivor.do("view.tolist()") == [8] * 4
    survivor.kill()
    assert users(number) == set()


@pytest.mark.slow
def test_a_worker_whose_shard_was_killed_offers_its_segment_to_the_next(
    worker: Peer, shard: Peer
) -> None:
    shard.attach(worker.offer(0))
    shard.kill()
    proof = attach(worker.offer(0), NBYTES).proof
    assert worker.do(f"segment.proven(0, bytes.fromhex('{proof.hex()}'))") is True


@pytest.mark.slow
def test_a_segment_open_in_another_process_is_refused(worker: Peer) -> None:
    offer = worker.offer(0)
    with pytest.raises(SegmentUnavailable, match="fd/0 is not a regular file"):
        attach(replace(offer, fd=0), NBYTES)
    with pytest.raises(SegmentUnavailable, match="cannot be opened"):
        attach(replace(offer, fd=offer.fd + 100), NBYTES)
    # A process id that came to be another worker's, with its segment at the same descriptor.
    with pytest.raises(SegmentUnavailable, match="does not hold the nonce"):
        attach(replace(offer, nonce=NONCE), NBYTES)
    worker.kill()
    with pytest.raises(SegmentUnavailable, match="cannot be opened"):
        attach(offer, NBYTES)


THEIRS = f"""
import fcntl, os, sys
os.setuid(65534)
fd = os.memfd_create("theirs", os.MFD_ALLOW_SEALING)
os.ftruncate(fd, {NBYTES})
os.pwrite(fd, {NONCE!r}, 0)
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, {SEALS})
for line in sys.stdin:
    print(fd, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_segment_of_another_user_is_refused_even_if_it_could_be_opened() -> None:
    peer = Peer(THEIRS)
    try:
        offer = Offer(peer.pid, peer.do(""), NBYTES, 0, NONCE)
        with pytest.raises(SegmentUnavailable, match="belongs to user 65534; expected 0"):
            attach(offer, NBYTES)
    finally:
        peer.kill()
