from __future__ import annotations

from benchmarks.link import stale
from benchmarks.relay import FRAMING, HEADERS, QUEUE_S, SEGMENT, Direction, wire_nbytes


def test_every_segment_has_its_framing() -> None:
    assert wire_nbytes(HEADERS) == FRAMING
    assert wire_nbytes(HEADERS + SEGMENT) == SEGMENT + FRAMING
    assert wire_nbytes(HEADERS + 2 * SEGMENT + 1) == 2 * SEGMENT + 1 + 3 * FRAMING


def test_packets_follow_one_another_at_the_rate_and_arrive_after_the_delay() -> None:
    packet = bytes(HEADERS + SEGMENT)
    seconds = 8 * (SEGMENT + FRAMING) / 1e6
    direction = Direction(rate=1e6, delay_s=2.0)
    assert direction.send(packet, now=10.0)
    assert direction.send(packet + b"2", now=10.0)
    assert direction.due == 10.0 + seconds + 2.0
    assert direction.arrived(12.0) == []
    assert direction.arrived(direction.due) == [packet]
    assert direction.arrived(20.0) == [packet + b"2"]
    assert direction.arrived(20.0) == []
    assert direction.due == float("inf")


def test_a_packet_that_would_wait_for_long_is_dropped() -> None:
    direction = Direction(rate=8 * (SEGMENT + FRAMING) / QUEUE_S, delay_s=0.0)
    packet = bytes(HEADERS + SEGMENT)
    assert [direction.send(packet, now=0.0) for _ in range(4)] == [True, True, False, False]
    assert direction.send(packet, now=QUEUE_S)


def test_only_namespaces_of_processes_that_are_gone_are_stale() -> None:
    listed = "cut41-hub\nbenchlink-41-near (id: 3)\nbenchlink-41-far\nbenchlink-42-near\n"
    assert stale(listed, lambda pid: pid == 42) == ["benchlink-41-near", "benchlink-41-far"]
