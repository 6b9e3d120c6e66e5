"""When the faults of a schedule let a job go on to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from psrpc.core.policy import ASYNC
from tests.chaos.cluster import Folders, Process
from tests.chaos.injector import IDLE_S, Injector
from tests.chaos.proxy import LinkCounts
from tests.chaos.schedule import Fault
from tests.chaos.witness import Options

DRAIN = Fault("drain", ("shard-0",), 1, 0.0)
SWALLOW = Fault("swallow", ("shard-0",), 1, 0.0, 0.1)


class FakeLink:
    """A link with as many connections as the test says, which does nothing to them."""

    def __init__(self) -> None:
        self.connections = 1
        self.counts = LinkCounts()


class FakeCluster:
    """A shard that takes any signal, and ends when the test says."""

    def __init__(self) -> None:
        self.options = Options(ASYNC, 1, 1, "sgd", 1, 64, 4, True, 10, 5)
        self.done = False
        self.shard = Process("shard-0", 1, Path("shard-0.log"), 0.0)
        self.shard_link = FakeLink()

    def living(self, _name: str) -> list[Process]:
        return [self.shard] if self.shard.status is None else []

    def link(self, _name: str) -> FakeLink:
        return self.shard_link

    def signal(self, _process: Process, _number: int) -> bool:
        return True

    def hold_back(self, _name: str) -> None:
        """Nothing is started here."""

    def let_go(self, _name: str) -> None:
        """Nothing is started here."""


class FakeProxy:
    """Does nothing to links."""

    def do(self, _function: Any) -> None:
        """The test changes counts itself."""


def injector_of(*faults: Fault) -> tuple[Injector, FakeCluster]:
    cluster: Any = FakeCluster()
    proxy: Any = FakeProxy()
    return Injector(cluster, proxy, faults), cluster


def test_a_job_does_not_end_while_a_process_takes_its_leave() -> None:
    """Later faults would find nothing to hit."""
    injector, cluster = injector_of(DRAIN)
    injector.advance(0.0, 1, True)
    injector.advance(IDLE_S + 0.1, 1, True)
    (drain,) = injector.records
    assert (drain.began, drain.ended) == (0.0, None)
    seen = [injector.over]
    cluster.shard.status = 75
    injector.advance(1.0, 1, True)
    assert drain.proof == "drained shard-0 (75)"
    assert [*seen, injector.over] == [False, True]


def test_a_job_goes_on_while_a_link_is_not_used() -> None:
    injector, cluster = injector_of(SWALLOW)
    injector.advance(0.0, 1, True)
    seen = [(injector.records[0].ended, injector.over)]
    for at in (0.2, 0.3):
        injector.advance(at, 1, True)
        seen.append((injector.records[0].ended, injector.over))
        cluster.shard_link.counts.swallowed = 1
    assert seen == [(None, False), (None, True), (0.3, True)]


def test_a_job_that_goes_on_for_a_fault_waits_for_the_next(tmp_path: Path) -> None:
    injector, cluster = injector_of(SWALLOW, DRAIN)
    folders = Folders(tmp_path)
    injector.advance(0.0, 1, True)
    seen = []
    for at in (0.2, 0.3, 0.4):
        injector.advance(at, 1, True)
        folders.open_gate(injector.over)
        seen.append(folders.gate.exists())
        cluster.shard_link.counts.swallowed = 1
    assert seen == [True, False, False]
    cluster.shard.status = 75
    injector.advance(0.5, 1, True)
    folders.open_gate(injector.over)
    assert folders.gate.exists()
