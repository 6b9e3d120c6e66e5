from __future__ import annotations

from collections.abc import Callable

import pytest

from coordinator.launch.process_health import (
    COORDINATOR,
    HUNG_S,
    IDLE_S,
    LATE_S,
    WORKER_HUNG_S,
    ProcessHealth,
    Sample,
)
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse, ShardStatus, WorkerStatus

LONG_S = HUNG_S + 5


class Watch:
    """Looks twice a second at a coordinator, ``shard-1`` (pid 11) and ``worker-a`` (pid 12), which
    were all started at 0."""

    def __init__(self) -> None:
        self.health = ProcessHealth()
        self.now = 0.0
        self.hung: dict[str, str] = {}
        self.stopped: set[str] = set()
        for pid, name in enumerate((COORDINATOR, "shard-1", "worker-a"), start=10):
            self.health.started(name, pid, 0.0)

    def answer(self, *members: ShardStatus | WorkerStatus) -> None:
        shards = [member for member in members if isinstance(member, ShardStatus)]
        workers = [member for member in members if isinstance(member, WorkerStatus)]
        self.health.answered(GetJobStatusResponse(shards=shards, workers=workers), self.now)

    def tick(self, seconds: float) -> dict[str, str]:
        end = self.now + seconds
        while self.now < end and not self.hung:
            self.now += LATE_S / 4
            self.hung = self.health.hung(self.stopped, self.now)
        return self.hung


@pytest.fixture
def watch() -> Watch:
    return Watch()


def shard(silent_s: float, state: str = "ready") -> ShardStatus:
    return ShardStatus(shard=1, state=state, silent_s=silent_s)


def worker(silent_s: float, state: str = "active", pid: int = 12) -> WorkerStatus:
    return WorkerStatus(worker="worker-0", pid=pid, state=state, silent_s=silent_s)


def test_the_time_before_a_process_is_up_does_not_count(watch: Watch) -> None:
    watch.now = 5.0
    watch.health.serves(5.0)
    watch.answer(ShardStatus(shard=1, state="missing"), worker(0.1, pid=99))
    watch.now = 8.0
    assert watch.health.ended("shard-1", 8.0) == 0.0
    watch.answer(worker(0.1))
    assert watch.health.ended("worker-a", 10.0) == 2.0
    assert watch.health.ended(COORDINATOR, 11.0) == 6.0


def test_a_place_that_still_shows_the_predecessor_is_not_the_process(watch: Watch) -> None:
    watch.now = 8.0
    watch.answer(shard(8.5))
    assert watch.health.ended("shard-1", 10.0) == 0.0


def test_a_coordinator_that_does_not_answer_hangs(watch: Watch) -> None:
    # Not while it reads the job.
    assert watch.tick(LONG_S) == {}
    watch.health.serves(watch.now)
    assert watch.tick(HUNG_S - 1) == {}
    watch.answer()
    assert watch.tick(HUNG_S) == {}
    assert watch.tick(1) == {COORDINATOR: "did not answer for 15 s"}


def test_a_watcher_that_was_stopped_itself_gives_the_coordinator_its_time(watch: Watch) -> None:
    watch.health.serves(0.0)
    watch.tick(HUNG_S - 1)
    watch.now += 3600
    assert watch.tick(HUNG_S) == {}
    assert watch.tick(1) == {COORDINATOR: "did not answer for 15 s"}


def test_a_process_that_is_stopped_hangs_whether_it_is_up_or_not(watch: Watch) -> None:
    watch.stopped = {"worker-a"}
    assert watch.tick(HUNG_S) == {}
    # It went on for a moment.
    watch.stopped = set()
    watch.tick(1)
    watch.stopped = {"worker-a"}
    assert watch.tick(HUNG_S) == {}
    assert watch.tick(1) == {"worker-a": "was stopped for 15 s"}


@pytest.mark.parametrize(
    ("member", "name"),
    [
        (shard(HUNG_S + 1, "silent"), "shard-1"),
        (worker(WORKER_HUNG_S + 1, "silent"), "worker-a"),
        # Taken for gone for good, and still running.
        (worker(WORKER_HUNG_S + 1, "left"), "worker-a"),
    ],
)
def test_a_member_that_the_coordinator_hears_nothing_from_hangs(
    watch: Watch, member: ShardStatus | WorkerStatus, name: str
) -> None:
    watch.now = 100.0
    watch.answer(member)
    seconds = f"{member.silent_s:.0f} s"
    assert watch.tick(1) == {name: f"gave no sign of life for {seconds}"}


@pytest.mark.parametrize(
    "members",
    [
        [shard(HUNG_S - 1, "silent")],
        [shard(HUNG_S + 1)],
        # Its predecessor.
        [shard(101.0, "silent")],
        [worker(WORKER_HUNG_S - 1, "silent")],
        [worker(WORKER_HUNG_S + 1, "silent", pid=99)],
        # It came back, under a new name.
        [worker(WORKER_HUNG_S + 1, "left"), worker(0.1)],
    ],
)
def test_others_do_not(watch: Watch, members: list[ShardStatus | WorkerStatus]) -> None:
    watch.now = 100.0
    watch.answer(*members)
    assert watch.tick(1) == {}


def test_a_successor_does_not_inherit_the_silence(watch: Watch) -> None:
    watch.now = 100.0
    watch.answer(shard(HUNG_S + 1, "silent"))
    watch.health.ended("shard-1", 100.0)
    watch.health.started("shard-1", 13, 100.0)
    watch.answer(shard(HUNG_S + 1, "silent"))
    assert watch.tick(1) == {}


def sample(watch: Watch, name: str, cpu_s: float = 0.0, runnable: bool = False) -> None:
    watch.health.sampled({name: Sample(cpu_s, runnable, "listening port=1")}, watch.now)


SILENT = [
    (shard, "shard-1", HUNG_S),
    (worker, "worker-a", WORKER_HUNG_S),
]


@pytest.mark.parametrize(("member", "name", "limit_s"), SILENT)
def test_a_process_silent_before_its_first_report_that_uses_the_cpu_is_only_slow(
    watch: Watch,
    member: Callable[[float, str], ShardStatus | WorkerStatus],
    name: str,
    limit_s: float,
) -> None:
    watch.now = 5.0
    watch.answer(member(0.1, "starting" if name == "shard-1" else "active"))
    for second in range(1, 11):
        watch.now = second * limit_s
        sample(watch, name, cpu_s=second)
        watch.answer(member(watch.now - 5.0, "silent"))
        assert watch.tick(limit_s - 1) == {}


@pytest.mark.parametrize(("member", "name", "limit_s"), SILENT)
def test_a_silent_process_without_progress_hangs(
    watch: Watch,
    member: Callable[[float, str], ShardStatus | WorkerStatus],
    name: str,
    limit_s: float,
) -> None:
    watch.now = 5.0
    watch.answer(member(0.1, "starting" if name == "shard-1" else "active"))
    sample(watch, name, cpu_s=3.0)
    watch.now = 4.75 + limit_s
    sample(watch, name, cpu_s=3.0)
    watch.answer(member(limit_s + 1, "silent"))
    seconds = f"{limit_s:.0f} s"
    assert watch.tick(1) == {
        name: f"gave no sign of life for {limit_s + 1:.0f} s, made no progress and used no CPU "
        f'for {seconds} after "listening port=1"'
    }


@pytest.mark.parametrize(("member", "name", "limit_s"), SILENT)
def test_from_its_first_report_on_silence_counts(
    watch: Watch,
    member: Callable[..., ShardStatus | WorkerStatus],
    name: str,
    limit_s: float,
) -> None:
    watch.now = 5.0
    reported = member(0.1)
    if isinstance(reported, WorkerStatus):
        reported.batches = 1
    assert name in watch.health.starting
    watch.answer(reported)
    assert name not in watch.health.starting
    watch.now = 5.0 + limit_s
    sample(watch, name, cpu_s=30.0, runnable=True)
    watch.answer(member(limit_s + 1, "silent"))
    assert watch.tick(1) == {name: f"gave no sign of life for {limit_s + 1:.0f} s"}


@pytest.mark.parametrize("name", [COORDINATOR, "shard-1", "worker-a"])
def test_a_process_that_neither_registers_nor_uses_the_cpu_hangs(watch: Watch, name: str) -> None:
    watch.tick(1)
    sample(watch, name, cpu_s=0.5)
    assert watch.tick(IDLE_S) == {}
    seconds = f"{IDLE_S:.0f} s"
    assert watch.tick(1) == {
        name: f'made no progress and used no CPU for {seconds} after "listening port=1"'
    }


def test_a_watcher_that_was_stopped_itself_has_not_seen_the_progress_of_others(
    watch: Watch,
) -> None:
    watch.tick(1)
    sample(watch, "shard-1")
    watch.now += 3600
    assert watch.tick(IDLE_S) == {}


def test_a_coordinator_that_is_slow_to_answer_for_the_first_time_does_not_hang(
    watch: Watch,
) -> None:
    watch.health.serves(watch.now)
    for second in range(1, 60):
        sample(watch, COORDINATOR, cpu_s=second)
        assert watch.tick(1) == {}
    watch.answer()
    assert watch.tick(HUNG_S) == {}
    sample(watch, COORDINATOR, cpu_s=99)
    assert watch.tick(1) == {COORDINATOR: "did not answer for 15 s"}
