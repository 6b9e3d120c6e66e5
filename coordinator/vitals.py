"""Which processes of ``coordinator up`` came up, and which of them hang. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from psrpc.v1.coordinator_pb2 import GetJobStatusResponse, ShardStatus, WorkerStatus

COORDINATOR = "coordinator"

HUNG_S = 15.0
"""A process that is stopped, or from which nothing is heard, for so long is replaced. Longer than
a lease: until then it is only taken for gone, and may come back by itself."""

WORKER_HUNG_S = 60.0
"""The same for a worker that is not stopped: the user's code may keep it from giving signs of life,
and its work goes to others after a lease anyway."""

LATE_S = 2.0
"""Who looks at the others so late stood still itself, and knows nothing of the time between."""


@dataclass(slots=True)
class _Life:
    """Of a process that runs; monotonic seconds."""

    pid: int
    started: float
    up: float | None = None
    stopped: float | None = None
    heard: float = 0.0
    silent_s: float = 0.0


class Vitals:
    """Follows processes by name: "coordinator", "shard-0", "worker-a". Not thread-safe."""

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}
        self._ticked: float | None = None

    def started(self, name: str, pid: int, now: float) -> None:
        """A process was started."""
        self._lives[name] = _Life(pid, now)

    def serves(self, now: float) -> None:
        """The coordinator has come up."""
        life = self._lives[COORDINATOR]
        life.up = life.heard = now

    def ended(self, name: str, now: float) -> float:
        """A process has ended; for how long it had been up, in seconds, 0 if it never was."""
        life = self._lives.pop(name)
        return 0.0 if life.up is None else now - life.up

    def answered(self, status: GetJobStatusResponse, asked: float) -> None:
        """The coordinator has answered what it was asked at ``asked``."""
        for name, life in self._lives.items():
            if name == COORDINATOR:
                life.heard = asked
                continue
            found = _known_as(status, name, life.pid, asked - life.started)
            if found is None:
                continue
            if life.up is None:
                life.up = asked
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
            if life.stopped is not None and now - life.stopped > HUNG_S:
                found[name] = f"was stopped for {HUNG_S:.0f} s"
            elif name == COORDINATOR:
                if life.up is not None and now - life.heard > HUNG_S:
                    found[name] = f"did not answer for {HUNG_S:.0f} s"
            elif life.silent_s > (HUNG_S if name.startswith("shard-") else WORKER_HUNG_S):
                found[name] = f"gave no sign of life for {life.silent_s:.0f} s"
        return found


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
