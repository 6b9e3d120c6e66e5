"""Follows the processes of ``coordinator up``: which run, came up, hang or have ended;
polls the status of their job."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.client.client import CoordinatorClient
from coordinator.launch.children import Children, Exited
from coordinator.launch.commands import ClusterCommands
from coordinator.launch.hosts import needed
from coordinator.launch.process_health import COORDINATOR, ProcessHealth, is_worker, registrations
from coordinator.launch.warm_start import ChildProcess, ForkSource, start_fresh
from coordinator.records.run_directory import Starting
from psrpc.core.errors import PsError
from psrpc.core.names import ADDRESS
from psrpc.ops.process import EARLY_SIGNAL
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse, WorkerStatus

STATUS_S = 0.5
"""Pause between two polls of the job's status."""


@dataclass(frozen=True, slots=True)
class Look:
    """A status, and the monotonic time of its request; the status is at least as new as that."""

    status: GetJobStatusResponse
    began: float


class Lookout:
    """Polls the job's status on a thread of its own, since a hung coordinator blocks its callers.
    Thread-safe; use it once."""

    def __init__(
        self, address: str, security: Security = PLAINTEXT, every_s: float = STATUS_S
    ) -> None:
        """``security`` holds the credentials of an operator."""
        self._client = CoordinatorClient(address, security)
        self._every_s = every_s
        self._newest: Look | None = None
        self._wake = threading.Event()
        self._ending = False
        self._lock = threading.Lock()
        # Dead workers to report: name, incarnation, reason. _lock guards this list and _told.
        self._gone: list[tuple[str, int, str]] = []
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)

    def start(self) -> None:
        """Starts the polling thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the call in progress and the thread."""
        self._ending = True
        self._wake.set()
        self._client.close()
        self._thread.join()

    @property
    def newest(self) -> Look | None:
        """The last answer; None before the first."""
        return self._newest

    def look(self) -> None:
        """Polls at once, or as soon as the present call has ended."""
        self._wake.set()

    def worker_is_gone(self, worker: WorkerStatus, reason: str) -> None:
        """Reports a dead worker to the coordinator, so that the job does not wait for its lease to
        lapse. Repeat it as long as the status shows the worker."""
        with self._lock:
            self._gone.append((worker.worker, worker.incarnation, reason))
            first = worker.worker not in self._told
            self._told.add(worker.worker)
        if first:
            self._wake.set()

    def _run(self) -> None:
        while not self._ending:
            self._wake.clear()
            for name, incarnation, reason in self._take_gone():
                with contextlib.suppress(PsError):
                    self._client.revoke_worker(name, incarnation, reason, bar=False)
            began = time.monotonic()
            # A failed poll is no news: an exit status or a time limit of the supervisor tells more.
            with contextlib.suppress(PsError):
                self._newest = Look(self._client.get_job_status(), began)
            self._wake.wait(self._every_s)

    def _take_gone(self) -> list[tuple[str, int, str]]:
        with self._lock:
            gone, self._gone = self._gone, []
        return gone


SAMPLE_S = 1.0
"""Interval between two samples of starting processes."""


@dataclass(frozen=True, slots=True)
class Death:
    """A child that has ended.

    Attributes:
        how: the end in words, e.g. "ended with exit status 1".
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
    """The child processes by name, and their status as the coordinator reports it. Not thread-safe;
    all children end with the ``with`` block."""

    def __init__(
        self,
        cluster: ClusterCommands,
        run_dir: Path,
        warm_start: ForkSource | None = None,
        note: Callable[[str], object] = lambda _line: None,
    ) -> None:
        """``warm_start`` is started already and outlives the fleet; ``note`` gets its messages."""
        self._cluster = cluster
        self._warm_start = warm_start
        self._note = note
        self._run_dir = run_dir
        self._starting = Starting(run_dir)
        self._children = Children()
        self._health = ProcessHealth()
        self._lookout: Lookout | None = None
        self._address: Stamp | None = None
        self._dead_workers: dict[int, str] = {}
        self._sampled = -SAMPLE_S
        self._ends_early = False
        self.newest: Look | None = None
        """The last status received, from the running coordinator or an earlier one."""

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exception: object) -> None:
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
        launch = start_fresh if self._warm_start is None else self._launch_warm
        pid = self._children.start(name, command.arguments, log, command.environment, launch)
        self._dead_workers.pop(pid, None)
        self._health.started(name, pid, time.monotonic())

    def _launch_warm(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: int
    ) -> ChildProcess:
        assert self._warm_start is not None
        return self._warm_start.start_process(
            arguments, environment, output, self._run_dir, self._note
        )

    def waits_for_import(self, name: str) -> bool:
        """Whether a shard or worker should start later, as a fork: TensorFlow is being imported."""
        if self._warm_start is None or name == COORDINATOR:
            return False
        return self._warm_start.waits(self._cluster.members[name].arguments, self._run_dir)

    def members(self) -> list[str]:
        """Returns the names of the shards and workers that the job needs; see :func:`needed`."""
        return needed(self._cluster.members, self._run_dir)

    def wait(self, seconds: float) -> list[Death]:
        """Returns the children that have ended, each once; waits up to ``seconds`` for one."""
        deaths = [
            self._died(exited, f"ended with {exited.how()}")
            for exited in self._children.wait(seconds)
        ]
        if self._warm_start is not None:
            self._warm_start.reap(self._children.pids())
        address = stamp(self._run_dir / ADDRESS)
        if COORDINATOR in self.alive and not self.serves and address not in (None, self._address):
            self._health.serves(time.monotonic())
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
            self._health.sampled(self._children.samples(self._health.starting), now)
        hung = self._health.hung(self._children.stopped(), now)
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
        self._health.answered(look.status, look.began)
        if self._ends_early and look.status.phase == "training":
            # Sent until the phase changes: a restarted coordinator has not seen the signal.
            self._children.send(COORDINATOR, EARLY_SIGNAL)
        for pid, how in self._dead_workers.items():
            for worker in registrations(look.status, pid):
                if worker.state != "left":
                    self._lookout.worker_is_gone(worker, how)
        return look

    def terminate(self, name: str) -> None:
        """Asks a child to stop; does nothing if it has ended. The coordinator gets SIGINT, which
        ends the run; after SIGTERM, a successor would resume it."""
        number = signal.SIGINT if name == COORDINATOR else signal.SIGTERM
        self._children.send(name, number)

    def end_all(self) -> None:
        """Kills the children that are left; they may be started again."""
        for exited in self._children.kill():
            self._died(exited, "was killed")

    def end_early(self) -> None:
        """Ends the job as done, with the training so far, once it trains. Thread-safe."""
        self._ends_early = True

    def _died(self, exited: Exited, how: str) -> Death:
        now = time.monotonic()
        if exited.name == COORDINATOR:
            self._close_lookout()
        elif self._lookout is not None:
            self._lookout.look()
        if is_worker(exited.name):
            self._dead_workers[exited.pid] = how
        return Death(exited, how, self._health.ended(exited.name, now), now)

    def _close_lookout(self) -> None:
        if self._lookout is not None:
            self._lookout.stop()
            self._lookout = None


Stamp = tuple[int, int]
"""Distinguishes a file from its predecessor at the same path."""


def stamp(path: Path) -> Stamp | None:
    """Returns the stamp of a file; None if it does not exist."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return (stat.st_ino, stat.st_mtime_ns)
