"""Which worker hosts which slice of the parameters."""

from __future__ import annotations

from coordinator.membership.members import Worker
from coordinator.membership.shard_places import STARTING_S, ShardPlaces
from coordinator.membership.slice_hosts import REGISTER_S, RESTART_S, SILENT_S, SliceHosts


class Cluster:
    """Slices and workers under a clock that the test sets; every worker is heard at each look."""

    def __init__(self, slices: int, last: dict[int, int] | None = None) -> None:
        self.now = 0.0
        self.places = ShardPlaces(slices, last=last)
        self.places.hosted = range(slices)
        self.workers: dict[str, Worker] = {}
        self.hosts = SliceHosts(self.places, self.workers, self.now)
        self.streams: dict[int, int] = {}
        """Slice -> incarnation of the process that serves it."""

    def join(self, *names: str, hosts: bool = True) -> None:
        for name in names:
            worker = Worker(name, 100 + len(self.workers), hosts=hosts, registered=self.now)
            self.workers[name] = worker

    def look(self, after_s: float = 0.0) -> dict[str, list[int]]:
        """Whom the slices without a host are given to, when ``after_s`` more have passed."""
        self.now += after_s
        for index, incarnation in self.streams.items():
            self.places.seen(index, incarnation, self.now)
        present = [worker for worker in self.workers.values() if worker.state == "active"]
        for worker in present:
            worker.seen = self.now
        given = {worker.name: self.hosts.look(worker.name, self.now) for worker in present}
        return {name: slices for name, slices in given.items() if slices}

    def serve(self, name: str, index: int) -> None:
        self.streams[index] = 1000 * (index + 1) + round(self.now)
        who = self.streams[index], f"{name}:1", name, 1, self.now, self.workers[name].incarnation
        self.places.register(index, *who)
        self.places.watches(index, self.streams[index], self.now)

    def end(self, index: int) -> None:
        """Ends the process that serves a slice, as the coordinator sees it first."""
        self.places.stopped_watching(index, self.streams.pop(index))

    def leave(self, name: str) -> None:
        self.workers[name].state = "left"


def test_each_worker_hosts_one_slice_in_the_order_of_registration() -> None:
    cluster = Cluster(2)
    cluster.join("a")
    assert cluster.look() == {"a": [0]}
    assert cluster.look(1.0) == {"a": [0]}
    cluster.serve("a", 0)
    assert cluster.look(10 * RESTART_S) == {}
    assert cluster.places.waiting_for() == "a worker to host slice 1"
    cluster.join("b", "c")
    assert cluster.look() == {"b": [1]}
    why = [(news.shard, news.worker) for news in cluster.hosts.news()]
    assert why == [(0, "a"), (1, "b")]
    assert cluster.hosts.news() == []


def test_slices_beside_shards_with_rows_are_given_and_no_shard_is() -> None:
    cluster = Cluster(3)
    cluster.places.hosted = range(2, 3)
    cluster.join("a", "b")
    assert cluster.look() == {"a": [2]}
    waits = "shards 0, 1 to register; a worker to host slice 2"
    assert cluster.places.waiting_for() == waits
    cluster.serve("a", 2)
    # A shard is served by a process of its own, however late that starts.
    assert cluster.look(10 * RESTART_S) == {}
    cluster.end(2)
    assert cluster.look(STARTING_S + 0.1) == {"b": [2]}


def test_a_lost_slice_goes_to_a_worker_that_hosts_none_and_not_back_to_its_process() -> None:
    cluster = Cluster(1)
    cluster.join("a", "b")
    cluster.look()
    cluster.serve("a", 0)
    cluster.end(0)
    # The connection may only have broken.
    assert cluster.look(STARTING_S) == {}
    assert cluster.look(0.1) == {"b": [0]}


def test_a_host_whose_stream_breaks_for_a_moment_keeps_its_slice() -> None:
    cluster = Cluster(1)
    cluster.join("a", "b")
    cluster.look()
    cluster.serve("a", 0)
    cluster.places.stopped_watching(0, cluster.streams[0])
    for _ in range(5):
        # Its heartbeats show that the process is there.
        assert cluster.look(STARTING_S - 0.5) == {}


def test_a_stopped_host_keeps_its_slice_for_a_while() -> None:
    cluster = Cluster(1)
    cluster.join("a", "b")
    cluster.look()
    cluster.serve("a", 0)
    cluster.streams.clear()
    cluster.leave("a")
    assert cluster.look(SILENT_S) == {}
    assert cluster.look(0.1) == {"b": [0]}


def test_a_worker_gets_a_second_slice_only_if_no_other_comes() -> None:
    cluster = Cluster(2)
    cluster.join("a", "b")
    cluster.look()
    cluster.serve("a", 0)
    cluster.serve("b", 1)
    cluster.end(1)
    cluster.leave("b")
    assert cluster.look(STARTING_S + 0.1) == {}
    assert cluster.look(RESTART_S - 1.0) == {}
    cluster.join("b again")
    assert cluster.look() == {"b again": [1]}
    cluster.leave("b again")
    assert cluster.look(1.1) == {"a": [1]}


def test_a_worker_that_does_not_register_its_slice_in_time_loses_it_to_another() -> None:
    cluster = Cluster(1)
    cluster.join("a", "b")
    assert cluster.look() == {"a": [0]}
    assert cluster.look(REGISTER_S) == {"a": [0]}
    assert cluster.look(0.1) == {"b": [0]}
    # Then it is the first one's turn again.
    assert cluster.look(REGISTER_S + 0.1) == {"a": [0]}


def test_a_worker_without_the_certificate_of_a_shard_or_without_signs_of_life_hosts_none() -> None:
    cluster = Cluster(1)
    cluster.join("a", hosts=False)
    assert cluster.look() == {}
    cluster.join("b")
    cluster.now += 2 * STARTING_S
    cluster.workers["a"].seen = cluster.now
    assert cluster.hosts.look("a", cluster.now) == []
    assert cluster.look() == {"b": [0]}


def test_a_restarted_coordinator_waits_for_the_hosts_that_there_were() -> None:
    cluster = Cluster(1, last={0: 7})
    cluster.join("a", "b")
    assert cluster.look(RESTART_S) == {}
    assert cluster.look(0.1) == {"a": [0]}
