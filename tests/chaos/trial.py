"""One schedule, from its first process to its verdict."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.chaos import invariants
from tests.chaos.cluster import MAX_FAILURES, Cluster, Folders
from tests.chaos.injector import Injector
from tests.chaos.launcher import Launcher
from tests.chaos.observer import Observer, Operator
from tests.chaos.proxy import Proxy
from tests.chaos.roles import ENTRIES
from tests.chaos.schedule import Schedule

TICK_S = 0.01

STILL_S = 90.0
"""A job whose status says the same for so long hangs; on a busy machine all is slow."""

TENSORFLOW_STILL_S = 400.0

LATE_S = 4.0
"""Who is still there so long after the coordinator never heard that the job is over."""

LEAVE_S = 20.0
"""By then everybody has left."""

DISK_BYTES = 128 << 20
"""Of the file system that is filled up: far more than a run needs, all its checkpoints included."""

STACKS_S = 0.5

TOO_LATE = "nothing to hit"
"""Instead of the proof of a fault that did not fire."""


@dataclass(frozen=True)
class Result:
    """Result of a schedule.

    Attributes:
        wrong: what did not hold; empty when all did.
        faults: what fired, and what shows it.
        recoveries: seconds from a shard's being up again to the first new step, where no other
            fault came in between.
        changed: whether the job came to follow another policy.
        seconds: it took; ``cpu_s`` of all its processes.
    """

    seed: int
    wrong: list[str]
    faults: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    changed: bool = False
    seconds: float = 0.0
    cpu_s: float = 0.0

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> Result:
        """The inverse of :meth:`write`."""
        return Result(**json.loads(path.read_text()))


def run_schedule(schedule: Schedule, root: Path, reference: Path | None = None) -> Result:
    """Runs ``schedule`` in ``root``, a new directory, which keeps its logs. Only from a process
    with one thread.

    Args:
        reference: see :func:`tests.chaos.invariants.check_final_state`.
    """
    began = time.monotonic()
    folders = Folders(root)
    root.mkdir(parents=True)
    with ExitStack() as stack:
        # Before there is any thread.
        launcher = stack.enter_context(Launcher(ENTRIES))
        if any(fault.kind == "full" for fault in schedule.faults):
            _mount(folders.run)
            stack.callback(_unmount, folders.run)
        proxy = stack.enter_context(Proxy())
        trial = _Trial(schedule, folders, launcher, proxy, reference)
        wrong = trial.run()
    return Result(
        schedule.seed,
        wrong,
        [f"{r.fault}: {r.proof or TOO_LATE}" for r in trial.injector.records],
        trial.recoveries(),
        trial.changed,
        time.monotonic() - began,
        _cpu_s(),
    )


class _Trial:
    def __init__(
        self,
        schedule: Schedule,
        folders: Folders,
        launcher: Launcher,
        proxy: Proxy,
        reference: Path | None,
    ) -> None:
        self._reference = reference
        self._options = schedule.options
        self._folders = folders
        self._cluster = Cluster(schedule.options, folders, launcher, proxy)
        self.injector = Injector(self._cluster, proxy, schedule.faults)
        self._observer: Observer
        self._operator: Operator

    def run(self) -> list[str]:
        """Runs the schedule and returns the violated invariants."""
        cluster, folders = self._cluster, self._folders
        cluster.start()
        address = cluster.links["observer"].address
        with (
            Observer(address) as self._observer,
            Operator(address, self._options, self._observer) as self._operator,
        ):
            ended = self._until_over()
        wrong = [] if ended else self._describe_hang()
        wrong += invariants.check_end(folders.run, self._options, cluster.done)
        wrong += invariants.check_processes(cluster.history, self.injector.touched)
        wrong += invariants.check_sights(self._observer.sights)
        wrong += invariants.check_faults(self.injector.records)
        wrong += invariants.check_logs(folders.logs)
        if cluster.done:
            wrong += invariants.check_final_state(folders.run, self._options, self._reference)
        if not self._options.tensorflow:
            wrong += invariants.check_cuts(folders.run, self._options)
        return wrong

    @property
    def changed(self) -> bool:
        return any(sight.policy > 1 for sight in self._observer.sights)

    def recoveries(self) -> list[float]:
        found = []
        times = [r.began for r in self.injector.records if r.began is not None]
        times += [r.ended for r in self.injector.records if r.ended is not None]
        for process in self._cluster.history:
            if not process.name.startswith("shard"):
                continue
            before = [s for s in self._observer.sights if s.at < process.started]
            if not before or before[-1].phase != "training":
                continue
            generation = before[-1].generation
            after = [s for s in self._observer.sights if s.generation > generation]
            first = next((s for s in after if s.step > after[0].step), None)
            if first and not any(process.started < at < first.at for at in times):
                found.append(first.at - process.started)
        return found

    def _until_over(self) -> bool:
        """Waits for the end; False when a process hangs."""
        cluster, injector, observer = self._cluster, self.injector, self._observer
        still_s = TENSORFLOW_STILL_S if self._options.tensorflow else STILL_S
        began = time.monotonic()
        done_at: float | None = None
        while True:
            now = time.monotonic()
            cluster.poll(now)
            if cluster.done:
                done_at = done_at or now
                if not cluster.everyone():
                    return True
                if now > done_at + LATE_S:
                    cluster.send_away()
            if now - max(began, observer.moved) > still_s:
                return False
            if done_at is not None and now > done_at + LEAVE_S:
                return False
            if not cluster.done and any(
                cluster.failures(name) > MAX_FAILURES for name in cluster.names
            ):
                return False
            injector.advance(now, observer.step, observer.training)
            self._folders.open_gate(injector.over and self._operator.over)
            time.sleep(TICK_S)

    def _describe_hang(self) -> list[str]:
        """Describes what each process waits for; stacks are in their logs."""
        cluster, status = self._cluster, self._observer.status
        if not self._options.tensorflow:
            cluster.write_stacks()
        time.sleep(STACKS_S)
        lines = [
            f"hung: phase {status.phase!r}, generation {status.generation}, step"
            f" {status.global_step} of {status.total_steps}, waiting for {status.waiting_for!r}"
        ]
        for shard in status.shards:
            lines.append(
                f"hung: shard {shard.shard} {shard.state}, silent {shard.silent_s:.1f} s,"
                f" waiting for {shard.waiting_for!r}"
            )
        for worker in status.workers:
            lines.append(
                f"hung: {worker.worker} {worker.state}, silent {worker.silent_s:.1f} s,"
                f" waiting for {worker.waiting_for!r}"
            )
        alive = ", ".join(f"{p.name} ({p.log.name})" for p in cluster.everyone())
        starts = ", ".join(f"{name} {cluster.starts(name)}" for name in cluster.names)
        return [*lines, f"hung: alive are {alive}; starts: {starts}"]


def _cpu_s() -> float:
    """Of this process and all that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _mount(path: Path) -> None:
    path.mkdir()
    size = f"size={DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "chaos", str(path)], check=True)


def _unmount(path: Path) -> None:
    """Keeps what was in there, unless it is large."""
    kept = path.with_name("kept")
    shutil.copytree(path, kept, ignore=shutil.ignore_patterns("filler"))
    subprocess.run(["umount", "--lazy", str(path)], check=True)
