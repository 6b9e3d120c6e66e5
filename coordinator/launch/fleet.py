"""The processes of ``coordinator up``: who runs, who came up, who hangs, who has ended."""

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
"""Between two looks at what the system says of processes that start."""


@dataclass(frozen=True, slots=True)
class Death:
    """A child that has ended.

    Attributes:
        how: in words, e.g. "ended with exit status 1".
        lived_s: since it came up, in seconds; 0 when it never did.
        at: monotonic seconds.
    """

    exited: Exited
    how: str
    lived_s: float
    at: float

    @property
    def name(self) -> str:
        """Of the process, the same in all its lives."""
        return self.exited.name

    def __str__(self) -> str:
        return f"{self.name} (pid {self.exited.pid}) {self.how}, see {self.exited.log}"


class Fleet:
    """The children by name, and the coordinator's word on them. Not thread-safe; all children end
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
        """The last answer of any coordinator."""

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
        """Names of those whose end has not been reported yet."""
        return self._children.alive()

    @property
    def serves(self) -> bool:
        """Whether the coordinator that runs has come up."""
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
        """Those who have ended, each once; waits up to ``seconds`` for one."""
        found = [
            self._died(exited, f"ended with {exited.how()}")
            for exited in self._children.wait(seconds)
        ]
        address = stamp(self._run_dir / ADDRESS)
        if COORDINATOR in self.alive and not self.serves and address not in (None, self._address):
            self._vitals.serves(time.monotonic())
            self._starting.release()
            # A new connection: an old one would wait before it tries the address again.
            self._lookout = Lookout(self._cluster.address, self._cluster.security)
            self._lookout.start()
        return found

    def kill_hung(self) -> list[Death]:
        """Kills those who do not go on by themselves. Call it often."""
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
        """The coordinator's word, if there is a new one; it hears of workers that died."""
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
        """Asks one to stop; nothing happens if it has ended. The coordinator ends the run, which
        at SIGTERM it would leave to another one."""
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
"""Tells a file from the one that was there before at the same place."""


def stamp(path: Path) -> Stamp | None:
    """Of a file; None when there is none."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return (stat.st_ino, stat.st_mtime_ns)
