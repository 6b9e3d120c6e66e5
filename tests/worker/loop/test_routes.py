"""Routes of a worker: broken by a call or a probe, whole by an answer."""

from __future__ import annotations

import socket
import threading

import pytest

from psrpc.ops.clock import ManualClock
from worker.loop.routes import PROBE_S, PROBES, SUSPECT_S, RouteProbe, connects


class World:
    """Two shards; ``cut`` has the addresses that nothing reaches."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.cut: set[str] = set()
        self.probed: list[str] = []
        self.routes = RouteProbe(self.clock.now, self.connects)
        self.routes.joined([("a:1", 1), ("b:2", 2)])

    def connects(self, address: str) -> bool:
        self.probed.append(address)
        return address not in self.cut


@pytest.fixture
def world() -> World:
    return World()


def test_a_call_that_fails_breaks_the_route_and_an_answer_mends_it(world: World) -> None:
    routes = world.routes
    routes.asked(1)
    world.clock.advance(1.0)
    routes.failed(1)
    world.clock.advance(2.0)
    routes.failed(1)
    assert routes.unreachable() == {1: 2.0}
    assert routes.answered(1)
    assert routes.unreachable() == {}
    assert not routes.answered(1)


def test_a_late_answer_has_the_shard_probed_now_and_then(world: World) -> None:
    routes = world.routes
    routes.asked(0)
    assert not routes.probe()
    world.clock.advance(SUSPECT_S)
    assert not routes.probe(), "it can be reached, and is only busy"
    assert not routes.probe()
    assert world.probed == ["a:1"]
    world.cut.add("a:1")
    world.clock.advance(PROBE_S)
    assert routes.probe()
    assert routes.unreachable() == {0: SUSPECT_S + PROBE_S}
    # From now on the call itself finds out.
    world.clock.advance(PROBE_S)
    assert not routes.probe()
    assert world.probed == ["a:1", "a:1"]


def test_a_broken_route_without_a_call_is_probed_until_it_is_whole(world: World) -> None:
    """A call may have been given up, since another shard had said that there is nothing to do."""
    routes = world.routes
    world.cut.add("b:2")
    routes.asked(1)
    routes.failed(1)
    routes.given_up(1)
    for _ in range(3):
        assert not routes.probe()
        world.clock.advance(PROBE_S)
    world.cut.clear()
    assert routes.probe()
    assert routes.unreachable() == {}
    assert world.probed == ["b:2"] * 4


def test_shards_are_probed_at_once() -> None:
    clock, both = ManualClock(), threading.Barrier(2)

    def connects(_address: str) -> bool:
        both.wait(60)
        return False

    routes = RouteProbe(clock.now, connects)
    routes.joined([("a:1", 1), ("b:2", 2)])
    for shard in range(2):
        routes.asked(shard)
    clock.advance(SUSPECT_S)
    assert routes.probe()
    assert routes.unreachable() == {0: SUSPECT_S, 1: SUSPECT_S}


def test_so_many_are_probed_at_once_and_the_others_the_next_time() -> None:
    clock, probed = ManualClock(), list[str]()

    def connects(address: str) -> bool:
        probed.append(address)
        return False

    routes = RouteProbe(clock.now, connects)
    addresses = [f"a:{port}" for port in range(1, 2 * PROBES)]
    routes.joined([(address, 1) for address in addresses])
    for shard in range(len(addresses)):
        routes.asked(shard)
    clock.advance(SUSPECT_S)
    assert routes.probe()
    assert len(routes.unreachable()) == len(probed) == PROBES
    assert routes.probe()
    assert sorted(probed) == sorted(addresses)


def test_a_probe_that_ends_after_the_call_says_nothing(world: World) -> None:
    routes = world.routes

    def answered_meanwhile(address: str) -> bool:
        routes.answered(0)
        return False

    world.routes._connects = answered_meanwhile
    routes.asked(0)
    world.clock.advance(SUSPECT_S)
    assert not routes.probe()
    assert routes.unreachable() == {}


def test_a_shard_at_another_address_has_another_route(world: World) -> None:
    routes = world.routes
    routes.asked(0)
    routes.failed(0)
    routes.asked(1)
    routes.failed(1)
    routes.joined([("a:1", 1), ("b:3", 2)])
    assert routes.unreachable() == {0: 0.0}
    routes.joined([("a:1", 4), ("b:3", 2)])
    assert routes.unreachable() == {}, "another process"


def test_a_shard_that_accepts_nothing_is_reached_all_the_same() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert connects(f"127.0.0.1:{server.getsockname()[1]}")


def test_where_nothing_listens_nothing_is_reached() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert not connects(f"127.0.0.1:{bound.getsockname()[1]}")
