"""Decides which processes of ``coordinator up`` have come up, and which ones hang. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from psrpc.v1.coordinator_pb2 import GetJobStatusResponse, ShardStatus, WorkerStatus

LEAST_CPU_S = 0.1
"""CPU seconds that count as progress. A stuck process uses less in minutes: its other threads only
look at their clocks now and then."""
COORDINATOR = "coordinator"
HUNG_S = 15.0
"""A process that is stopped or silent for so long is replaced. This is longer than a lease, after
which the job goes on without the process: it may still come back by itself."""

WORKER_HUNG_S = 60.0
"""The same limit for a worker that is silent but not stopped: user code may delay its heartbeats,
and its work goes to other workers after a lease anyway."""

IDLE_S = 120.0
"""A process that has not registered is replaced after this time without progress. Longer than user
code should wait silently: --connect-timeout ends all other waits by then."""

LATE_S = 2.0
"""A pause this long between two checks means that the supervisor itself was suspended. Processes
are not judged by that time."""


@dataclass(slots=True)
class _Life:
    """The state of a running process; times in monotonic seconds."""

    pid: int
    started: float
    progress: StartProgress
    reported: bool = False
    up: float | None = None
    stopped: float | None = None
    heard: float = 0.0
    silent_s: float = 0.0


class ProcessHealth:
    """Follows processes by name: "coordinator", "shard-0", "worker-a". Not thread-safe.

    From its first report on (a coordinator's first answer, a shard's readiness, a worker's first
    batch), a process is judged by its heartbeats. Until then silence alone does not count: a
    process that is only slow makes progress.
    """

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}
        self._ticked: float | None = None

    def started(self, name: str, pid: int, now: float) -> None:
        """Records the start of a process."""
        self._lives[name] = _Life(pid, now, StartProgress(now))

    @property
    def starting(self) -> list[str]:
        """The processes that have not made their first report; they need samples."""
        return [name for name, life in self._lives.items() if not life.reported]

    def sampled(self, samples: Mapping[str, Sample], now: float) -> None:
        """Records samples of some of the :attr:`starting` processes."""
        for name, sample in samples.items():
            self._lives[name].progress.look(sample, now)

    def serves(self, now: float) -> None:
        """Records that the coordinator has come up."""
        life = self._lives[COORDINATOR]
        life.up = life.heard = now
        life.progress.moved(now)

    def ended(self, name: str, now: float) -> float:
        """Records the end of a process; returns how many seconds it had been up, 0 if never."""
        life = self._lives.pop(name)
        return 0.0 if life.up is None else now - life.up

    def answered(self, status: GetJobStatusResponse, asked: float) -> None:
        """Records the coordinator's answer to a request made at ``asked``."""
        for name, life in self._lives.items():
            if name == COORDINATOR:
                life.reported = True
                life.heard = asked
                continue
            member = _known_as(status, name, life.pid, asked - life.started)
            if member is None:
                continue
            if life.up is None:
                life.up = asked
                life.progress.moved(asked)
            life.reported = life.reported or _reports(member)
            life.silent_s = member.silent_s if member.state in {"silent", "left"} else 0.0

    def hung(self, stopped: Collection[str], now: float) -> dict[str, str]:
        """Returns the processes to replace, each with the reason. Call it often.

        Args:
            stopped: the processes that are stopped (SIGSTOP) now.
        """
        late = self._ticked is not None and now - self._ticked > LATE_S
        self._ticked = now
        hung: dict[str, str] = {}
        for name, life in self._lives.items():
            if name not in stopped or late:
                life.stopped = None
            elif life.stopped is None:
                life.stopped = now
            if late:
                life.heard = now
                life.progress.moved(now)
            why = _why_hung(name, life, now)
            if why:
                hung[name] = why
        return hung


def _why_hung(name: str, life: _Life, now: float) -> str:
    """Returns why a process counts as hung, in words; empty if it does not."""
    if life.stopped is not None and now - life.stopped > HUNG_S:
        return f"was stopped for {HUNG_S:.0f} s"
    if life.up is None:
        return _stands_still(life, IDLE_S, now) if life.progress.sampled else ""
    if name == COORDINATOR:
        silent = now - life.heard > HUNG_S
        why, limit_s = f"did not answer for {HUNG_S:.0f} s", HUNG_S
    else:
        limit_s = HUNG_S if name.startswith("shard-") else WORKER_HUNG_S
        silent = life.silent_s > limit_s
        why = f"gave no sign of life for {life.silent_s:.0f} s"
    if not silent or life.reported or not life.progress.sampled:
        return why if silent else ""
    still = _stands_still(life, limit_s, now)
    if not still or name == COORDINATOR:
        return why if still else ""
    return f"{why}, {still}"


def _stands_still(life: _Life, limit_s: float, now: float) -> str:
    """Returns for how long a starting process has stood still, in words; empty if it progresses."""
    idle_s = life.progress.idle_s(now)
    if idle_s <= limit_s:
        return ""
    return f"made no progress and used no CPU for {idle_s:.0f} s after {life.progress.milestone}"


def _reports(member: ShardStatus | WorkerStatus) -> bool:
    """Whether a shard or worker has made its first report."""
    if isinstance(member, ShardStatus):
        return member.state == "ready"
    return member.batches > 0


def is_worker(name: str) -> bool:
    """Whether a process of that name is a worker."""
    return name.startswith("worker-")


def registrations(status: GetJobStatusResponse, pid: int) -> list[WorkerStatus]:
    """Returns the registrations of a worker process, oldest first. A worker that comes back after
    the job went on without it registers again, under a new name."""
    return [worker for worker in status.workers if worker.pid == pid]


def _known_as(
    status: GetJobStatusResponse, name: str, pid: int, age_s: float
) -> ShardStatus | WorkerStatus | None:
    """Returns the status of a process; None before it has registered."""
    if not name.startswith("shard-"):
        return next(reversed(registrations(status, pid)), None)
    index = int(name.removeprefix("shard-"))
    for shard in status.shards:
        # A heartbeat from before the start of this process is its predecessor's.
        if shard.shard == index and shard.state != "missing" and shard.silent_s < age_s:
            return shard
    return None


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of a process together with its descendants.

    Attributes:
        cpu_s: CPU seconds used so far, user and system.
        runnable: whether it runs or waits for a CPU or a disk, so that it is not stuck even if it
            uses little CPU time.
        milestone: the last event in its log; empty if it has logged none.
    """

    cpu_s: float
    runnable: bool
    milestone: str = ""


class StartProgress:
    """Follows one process from its start to its first report. Not thread-safe."""

    def __init__(self, now: float) -> None:
        """``now`` is the start of the process, in monotonic seconds."""
        self._moved = now
        self._cpu_s = 0.0
        self._milestone = ""
        self.sampled = False
        """Whether the system has provided any sample of the process."""

    @property
    def milestone(self) -> str:
        """The last milestone of the process, in words."""
        return f'"{self._milestone}"' if self._milestone else "its start"

    def look(self, sample: Sample, now: float) -> None:
        """Takes in a sample: CPU time, runnability and a new milestone are progress."""
        self.sampled = True
        # The CPU time of a child disappears if another process reaps it.
        used_s = abs(sample.cpu_s - self._cpu_s)
        if used_s >= LEAST_CPU_S or sample.runnable or sample.milestone != self._milestone:
            self.moved(now)
            self._cpu_s, self._milestone = sample.cpu_s, sample.milestone

    def moved(self, now: float) -> None:
        """Records progress, or a gap in which progress could not be observed."""
        self._moved = now

    def idle_s(self, now: float) -> float:
        """Returns the seconds without progress."""
        return now - self._moved
