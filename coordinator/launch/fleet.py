"""Follows the processes of ``coordinator up``: which run, came up, hang or have ended."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from coordinator.launch.children import Children, Exited
from coordinator.launch.commands import Cluster
from coordinator.launch.process_health import COORDINATOR, Vitals, registrations
from coordinator.launch.status_poller import Look, Lookout
from coordinator.records.run_directory import Starting
from psrpc.core.names import ADDRESS

SAMPLE_S = 1.0
"""Interval between two samples of starting processes."""


@dataclass(frozen=True, slots=True)
class Death:
    """A child that has ended.

    Attributes:
        how: in words, e.g. "ended with exit status 1".
        lived_s: seconds since it came up; 0 if it never did.
        at: monotonic seconds.
    """

    exited: Exited
    how: str
    lived_s: float
    at: float

    @property
    def name(self) -> str:
        """Name of the process, the same in all its lives."""
        return self.exited.name

    def __str__(self) -> str:
        return f"{self.name} (pid {self.exited.pid}) {self.how}, see {self.exited.log}"


class Fleet:
    """The children by name, and the coordinator's status of them. Not thread-safe; all children end
    with the ``with`` block."""

    def __init__(self, cluster: Cluster, run_dir: Path) -> None:
        self._cluster = cluster
        self._run_dir = run_dir
        self._starting = Starting(run_dir)
        self._children = Children()
        self._vitals = Vitals()
        self._lookout: Lookout | None = None
        self._address: Stamp | None = None
        self._dead_workers: dict[int, str] = {}
        self._sampled = -SAMPLE_S
        self.newest: Look | None = None
        """The last status from any coordinator."""

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._children.kill()
        self._close_lookout()
        self._starting.release()

    @property
    def alive(self) -> list[str]:
        """Names of the children whose end was not reported yet."""
        return self._children.alive()

    @property
    def serves(self) -> bool:
        """Whether the running coordinator has come up."""
        return self._lookout is not None

    def start(self, name: str) -> None:
        """Starts a process that is not alive. Raises OSError."""
        if name == COORDINATOR:
            self._starting.hold()
            command = self._cluster.coordinator
            self._address = stamp(self._run_dir / ADDRESS)
        else:
            command = self._cluster.members[name]
        log = self._run_dir / "logs" / f"{name}.log"
        pid = self._children.start(name, command.arguments, log, command.environment)
        self._dead_workers.pop(pid, None)
        self._vitals.started(name, pid, time.monotonic())

    def start_members(self) -> None:
        """Starts all shards and workers."""
        for name in self._cluster.members:
            self.start(name)

    def wait(self, seconds: float) -> list[Death]:
        """Returns the children that have ended, each once; waits up to ``seconds`` for one."""
        deaths = [
            self._died(exited, f"ended with {exited.how()}")
            for exited in self._children.wait(seconds)
        ]
        address = stamp(self._run_dir / ADDRESS)
        if COORDINATOR in self.alive and not self.serves and address not in (None, self._address):
            self._vitals.serves(time.monotonic())
            self._starting.release()
            # A new connection: an old one would pause before it retries the address.
            self._lookout = Lookout(self._cluster.address, self._cluster.security)
            self._lookout.start()
        return deaths

    def kill_hung(self) -> list[Death]:
        """Kills hung children. Call it often."""
        now = time.monotonic()
        if now - self._sampled >= SAMPLE_S:
            self._sampled = now
            self._vitals.sampled(self._children.samples(self._vitals.starting), now)
        hung = self._vitals.hung(self._children.stopped(), now)
        return [
            self._died(self._children.kill_one(name), f"{why} and was killed")
            for name, why in hung.items()
        ]

    def read_look(self) -> Look | None:
        """Returns the coordinator's status if there is a new one; reports dead workers to it."""
        look = self._lookout.newest if self._lookout is not None else None
        if look is None or look is self.newest or self._lookout is None:
            return None
        self.newest = look
        self._vitals.answered(look.status, look.began)
        for pid, how in self._dead_workers.items():
            for worker in registrations(look.status, pid):
                if worker.state != "left":
                    self._lookout.worker_is_gone(worker, how)
        return look

    def terminate(self, name: str) -> None:
        """Asks a child to stop; does nothing if it has ended. The coordinator gets SIGINT to end
        the run, which at SIGTERM it would leave to a successor."""
        number = signal.SIGINT if name == COORDINATOR else signal.SIGTERM
        self._children.send(name, number)

    def _died(self, exited: Exited, how: str) -> Death:
        now = time.monotonic()
        if exited.name == COORDINATOR:
            self._close_lookout()
        elif self._lookout is not None:
            self._lookout.look()
        if is_worker(exited.name):
            self._dead_workers[exited.pid] = how
        return Death(exited, how, self._vitals.ended(exited.name, now), now)

    def _close_lookout(self) -> None:
        if self._lookout is not None:
            self._lookout.stop()
            self._lookout = None


def is_worker(name: str) -> bool:
    """Whether a process of that name is a worker."""
    return name.startswith("worker-")


Stamp = tuple[int, int]
"""Distinguishes a file from its predecessor at the same path."""


def stamp(path: Path) -> Stamp | None:
    """Returns the stamp of a file; None if it does not exist."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return (stat.st_ino, stat.st_mtime_ns)
