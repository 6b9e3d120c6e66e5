"""The slices of a worker: started and stopped with it, called directly; what their ends mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from pserver.process.config import ServeConfig
from pserver.process.ending import Ending
from pserver.process.hosted import HostedSlice
from psrpc.core.errors import InvalidArgument, InvalidJob
from psrpc.options.settings import WorkerOptions
from psrpc.v1 import coordinator_pb2 as pb
from tests.pserver.fake_coordinator import WAIT_S, FakeCoordinator, running
from tests.pserver.shards import INITIAL, fence_of, plan_of, whole
from tests.worker.shards import standing_alone
from worker.process.hosting import SliceHosting

PLAN = plan_of()
WORKER = 12


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[FakeCoordinator]:
    with running(FakeCoordinator(tmp_path, PLAN)) as fake:
        yield fake


@contextmanager
def hosting(fake: FakeCoordinator) -> Iterator[SliceHosting]:
    with standing_alone() as standing:
        options = WorkerOptions(coordinator=fake.address, connect_timeout_s=5.0)
        with SliceHosting(standing, options, WORKER) as hosts:
            hosts.offer()
            assert standing.membership.hosts
            yield hosts


def over(fake: FakeCoordinator) -> None:
    fake.commands.put(pb.WatchResponse(shutdown=pb.Shutdown()))


def wait_for_end(hosts: SliceHosting, shard: int) -> None:
    own = hosts._slices.get(shard)
    assert own is None or own.join(WAIT_S)


def test_a_slice_is_a_shard_that_its_worker_calls_directly(coordinator: FakeCoordinator) -> None:
    with hosting(coordinator) as hosts:
        hosts._standing.host([0])
        hosts._standing.host([0])
        registered = coordinator.registered.get(timeout=WAIT_S)
        coordinator.ready.get(timeout=WAIT_S)
        assert (registered.shard, registered.worker) == (0, WORKER)
        where = (registered.address, registered.incarnation, PLAN, 0)
        with hosts.connect(*where) as client:
            client.initialize(fence_of(client), whole(PLAN), INITIAL)
            client.pull(fence_of(client), None, whole(PLAN))
            assert client.transport is not None
            assert client.transport.kind == "own process"
        # The shard of another process, or of another start of this one.
        with hosts.connect(registered.address, registered.incarnation + 1, PLAN, 0) as client:
            assert client.local is None
        coordinator.saved = True
    leaving = [coordinator.heartbeats.get(timeout=WAIT_S)]
    while not leaving[-1].leaving:
        leaving.append(coordinator.heartbeats.get(timeout=WAIT_S))
    assert coordinator.registered.empty()
    hosts.host([0])
    assert not hosts._slices


def test_a_worker_that_leaves_ends_its_slices_and_takes_no_more() -> None:
    endings: list[Ending] = []

    def serves(_config: ServeConfig, ending: Ending, *_more: object) -> None:
        endings.append(ending)
        ending.wait()

    options = WorkerOptions(coordinator="127.0.0.1:1")
    with standing_alone() as standing:
        start = partial(HostedSlice, serves=serves)
        try:
            with SliceHosting(standing, options, WORKER, start) as hosts:
                hosts.host([0])
            assert not hosts._slices
            assert [ending.event.is_set() for ending in endings] == [True]
            hosts.host([1])
            assert not hosts._slices
        finally:
            for ending in endings:
                ending.end()


def test_a_slice_that_cannot_serve_ends_its_worker(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("of another run")
    with hosting(coordinator) as hosts:
        hosts.host([0])
        wait_for_end(hosts, 0)
        with pytest.raises(InvalidJob, match="does not share the coordinator's run directory"):
            hosts._standing.check()


def test_a_slice_that_another_worker_hosts_by_now_ends_alone(coordinator: FakeCoordinator) -> None:
    with hosting(coordinator) as hosts:
        hosts.host([0])
        coordinator.registered.get(timeout=WAIT_S)
        coordinator.ready.get(timeout=WAIT_S)
        coordinator.replaced = True
        wait_for_end(hosts, 0)
        hosts._standing.check()
        coordinator.replaced = False
        hosts.host([0])
        coordinator.registered.get(timeout=WAIT_S)
        over(coordinator)
        wait_for_end(hosts, 0)
        hosts._standing.check()


def test_options_that_a_slice_cannot_have_are_refused_when_it_is_offered() -> None:
    options = WorkerOptions(coordinator="127.0.0.1:1", advertise="host:port")
    with standing_alone() as standing, SliceHosting(standing, options, WORKER) as hosts:
        with pytest.raises(InvalidArgument, match="port"):
            hosts.offer()
        assert not standing.membership.hosts
