"""Which processes of ``coordinator up`` came up, and which of them hang. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from psrpc.v1.coordinator_pb2 import GetJobStatusResponse, ShardStatus, WorkerStatus

LEAST_CPU_S = 0.1
"""CPU seconds that count as progress. A process whose work has come to a halt uses less in minutes:
its other threads look at their clocks now and then."""


COORDINATOR = "coordinator"
HUNG_S = 15.0
"""A process that is stopped, or from which nothing is heard, for so long is replaced. Longer than
a lease: until then it is only taken for gone, and may come back by itself."""

WORKER_HUNG_S = 60.0
"""The same for a worker that is not stopped: the user's code may keep it from giving signs of life,
and its work goes to others after a lease anyway."""

IDLE_S = 120.0
"""A process that has not even registered is replaced when it makes no progress for so long. Longer
than user code should wait for anything without a word: nobody else waits longer either, see
--connect-timeout."""

LATE_S = 2.0
"""Who looks at the others so late stood still itself, and knows nothing of the time between."""


@dataclass(slots=True)
class _Life:
    """Of a process that runs; monotonic seconds."""

    pid: int
    started: float
    progress: StartProgress
    reported: bool = False
    up: float | None = None
    stopped: float | None = None
    heard: float = 0.0
    silent_s: float = 0.0


class Vitals:
    """Follows processes by name: "coordinator", "shard-0", "worker-a". Not thread-safe.

    A process is judged by its signs of life from its first report on: a coordinator's first answer,
    a shard that is ready, a worker's first batch. Until then silence alone is nothing: a process
    that is only slow makes progress.
    """

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}
        self._ticked: float | None = None

    def started(self, name: str, pid: int, now: float) -> None:
        """A process was started."""
        self._lives[name] = _Life(pid, now, StartProgress(now))

    @property
    def starting(self) -> list[str]:
        """The processes that have not made their first report, whose samples matter."""
        return [name for name, life in self._lives.items() if not life.reported]

    def sampled(self, samples: Mapping[str, Sample], now: float) -> None:
        """What the system says of processes, some of those that are :attr:`starting`."""
        for name, sample in samples.items():
            self._lives[name].progress.look(sample, now)

    def serves(self, now: float) -> None:
        """The coordinator has come up."""
        life = self._lives[COORDINATOR]
        life.up = life.heard = now
        life.progress.moved(now)

    def ended(self, name: str, now: float) -> float:
        """A process has ended; for how long it had been up, in seconds, 0 if it never was."""
        life = self._lives.pop(name)
        return 0.0 if life.up is None else now - life.up

    def answered(self, status: GetJobStatusResponse, asked: float) -> None:
        """The coordinator has answered what it was asked at ``asked``."""
        for name, life in self._lives.items():
            if name == COORDINATOR:
                life.reported = True
                life.heard = asked
                continue
            found = _known_as(status, name, life.pid, asked - life.started)
            if found is None:
                continue
            if life.up is None:
                life.up = asked
                life.progress.moved(asked)
            life.reported = life.reported or _reports(found)
            life.silent_s = found.silent_s if found.state in {"silent", "left"} else 0.0

    def hung(self, stopped: Collection[str], now: float) -> dict[str, str]:
        """Which processes have to be replaced, and why. Call it often.

        Args:
            stopped: the processes that are stopped (SIGSTOP) now.
        """
        late = self._ticked is not None and now - self._ticked > LATE_S
        self._ticked = now
        found: dict[str, str] = {}
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
                found[name] = why
        return found


def _why_hung(name: str, life: _Life, now: float) -> str:
    """In words; empty if it does not hang."""
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
    """Of a process that starts; in words, empty if it makes progress."""
    idle_s = life.progress.idle_s(now)
    if idle_s <= limit_s:
        return ""
    return f"made no progress and used no CPU for {idle_s:.0f} s after {life.progress.milestone}"


def _reports(member: ShardStatus | WorkerStatus) -> bool:
    """Whether it has made its first report."""
    if isinstance(member, ShardStatus):
        return member.state == "ready"
    return member.batches > 0


def registrations(status: GetJobStatusResponse, pid: int) -> list[WorkerStatus]:
    """What a worker process has been known as, oldest first: who was taken for gone and comes back
    gets a new name."""
    return [worker for worker in status.workers if worker.pid == pid]


def _known_as(
    status: GetJobStatusResponse, name: str, pid: int, age_s: float
) -> ShardStatus | WorkerStatus | None:
    """None before the process has registered."""
    if not name.startswith("shard-"):
        return next(reversed(registrations(status, pid)), None)
    index = int(name.removeprefix("shard-"))
    for shard in status.shards:
        # Its predecessor's last sign of life is older than the process.
        if shard.shard == index and shard.state != "missing" and shard.silent_s < age_s:
            return shard
    return None


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process together with all that it has started.

    Attributes:
        cpu_s: CPU seconds used so far, user and system.
        runnable: whether it waits for a CPU or for a disk, neither of which is its own doing.
        milestone: the last event in its log; empty if it has logged none.
    """

    cpu_s: float
    runnable: bool
    milestone: str = ""


class StartProgress:
    """Follows one process from its start to its first report. Not thread-safe."""

    def __init__(self, now: float) -> None:
        """``now`` is when the process was started, in monotonic seconds."""
        self._moved = now
        self._cpu_s = 0.0
        self._milestone = ""
        self.sampled = False
        """Whether the system tells anything of the process."""

    @property
    def milestone(self) -> str:
        """The last one that the process has reached, in words."""
        return f'"{self._milestone}"' if self._milestone else "its start"

    def look(self, sample: Sample, now: float) -> None:
        """Takes in a sample: progress is CPU time, the wish to run, or another milestone."""
        self.sampled = True
        # What a child process has used vanishes when somebody else waits for its end.
        used_s = abs(sample.cpu_s - self._cpu_s)
        if used_s >= LEAST_CPU_S or sample.runnable or sample.milestone != self._milestone:
            self.moved(now)
            self._cpu_s, self._milestone = sample.cpu_s, sample.milestone

    def moved(self, now: float) -> None:
        """The process has made progress, or nobody can say that it has not."""
        self._moved = now

    def idle_s(self, now: float) -> float:
        """Seconds without progress."""
        return now - self._moved
