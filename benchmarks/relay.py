"""Joins two TUN devices by a link of given rate and delay: ``python -m benchmarks.relay``.

For kernels without ``tc netem``. Packets pass whole as the kernel hands them over, with TCP's
segmentation left to the receiver, so that at 1 Gbit/s some 2000 of them a second go each way.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

SEGMENT = 1448
"""Bytes of TCP payload in a frame of Ethernet."""

FRAMING = 78
"""Bytes around them: Ethernet with its gap and preamble, IP and TCP without options."""

HEADERS = 62
"""Bytes before the payload of what a device hands over: its own header, IP and TCP."""

QUEUE_S = 0.02
"""How long a packet may wait for those before it; one that would wait longer is dropped."""

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_TUN, _NO_PI, _VNET_HDR = 0x0001, 0x1000, 0x4000
_CSUM, _TSO4 = 0x01, 0x02
_LARGEST = 65536 + 64


class Direction:
    """One direction of the link. Not thread-safe; times are seconds of any clock."""

    def __init__(self, rate: float, delay_s: float) -> None:
        """``rate`` is in bits per second; ``delay_s`` is the time on the way."""
        self._rate = rate
        self._delay_s = delay_s
        self._free_at = 0.0
        self._queue: deque[tuple[float, bytes]] = deque()

    def send(self, packet: bytes, now: float) -> bool:
        """Accepts ``packet``, or returns False if the queue is full."""
        begin = max(now, self._free_at)
        if begin - now > QUEUE_S:
            return False
        self._free_at = begin + 8 * wire_nbytes(len(packet)) / self._rate
        self._queue.append((self._free_at + self._delay_s, packet))
        return True

    def arrived(self, now: float) -> list[bytes]:
        """Returns the packets that have arrived at the other end, once each."""
        packets = []
        while self._queue and self._queue[0][0] <= now:
            packets.append(self._queue.popleft()[1])
        return packets

    @property
    def due(self) -> float:
        """When the next packet arrives."""
        return self._queue[0][0] if self._queue else math.inf


def wire_nbytes(nbytes: int) -> int:
    """Returns the bytes on the wire of what a device hands over as ``nbytes``, in segments."""
    payload = max(0, nbytes - HEADERS)
    return payload + FRAMING * max(1, math.ceil(payload / SEGMENT))


def open_device(name: str) -> int:
    """Makes TUN device ``name``, which goes with the descriptor that this returns."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", name.encode(), _TUN | _NO_PI | _VNET_HDR)
    fcntl.ioctl(descriptor, _TUNSETIFF, request)
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _CSUM | _TSO4)
    return descriptor


def relay(near: int, far: int, rate: float, delay_s: float) -> None:
    """Passes packets between two devices until standard input closes."""
    ways = {near: (Direction(rate, delay_s), far), far: (Direction(rate, delay_s), near)}
    stopped = sys.stdin.fileno()
    while True:
        now = time.monotonic()
        for direction, target in ways.values():
            for packet in direction.arrived(now):
                _write(target, packet)
        due = min(direction.due for direction, _ in ways.values())
        wait_s = None if due == math.inf else max(0.0, due - time.monotonic())
        readable, _, _ = select.select([near, far, stopped], [], [], wait_s)
        if stopped in readable:
            return
        now = time.monotonic()
        for source in readable:
            _read(source, ways[source][0], now)


def _read(source: int, direction: Direction, now: float) -> None:
    try:
        while True:
            direction.send(os.read(source, _LARGEST), now)
    except BlockingIOError:
        return


def _write(target: int, packet: bytes) -> None:
    try:
        os.write(target, packet)
    except OSError:
        # The device is not up yet, or full: a link loses packets, too.
        return


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the devices, says so, and relays."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay", description=__doc__)
    parser.add_argument("near", help="name of the one device")
    parser.add_argument("far", help="name of the other")
    parser.add_argument("--rate", type=float, required=True, help="bits per second")
    parser.add_argument("--delay-s", type=float, required=True, help="seconds one way")
    options = parser.parse_args(argv)
    near, far = open_device(options.near), open_device(options.far)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    relay(near, far, options.rate, options.delay_s)


if __name__ == "__main__":
    main()
