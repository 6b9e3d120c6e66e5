"""Carries out the faults of a schedule, and proves that they happened."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tests.chaos.cluster import Cluster, Process, is_stopped
from tests.chaos.proxy import Link, Proxy
from tests.chaos.roles import LEASE_S
from tests.chaos.schedule import ENDING, STARTING, Fault

PATIENCE_S = 2.0
"""A fault that waits for a step comes anyway when the job stands still for so long."""

START_S = 30.0
"""And before the first step."""

SLOW = 30
"""With TensorFlow, which takes a minute to come back, all patience is so many times longer."""

REPLACE_S = LEASE_S + 0.2
"""When a process that stands still is replaced."""

STOPPED_S = 1.0
"""How long a process may take to stand still."""

IDLE_S = 0.5
"""How long a fault waits for a target before the job may go on to its end."""

FREE_S = 1.0
"""How long after the disk has room again a process may still end because it had none."""

VAIN_S = 10.0
"""A fault that finds nothing to hit in so long is given up, and counts as one that did not fire."""


@dataclass
class Record:
    """The outcome of a fault.

    Attributes:
        began: monotonic seconds; None before it fired. ``ended`` too.
        proof: what shows that it was one; empty when nothing does.
        steps: its effect shows only if the job goes on.
        idle: its time has come, or is over, and it had no target.
        late: the job was over before.
        later: what comes in its job_run, so many seconds after it began; ``undo`` ends it, which
            comes once it is ``effective``.
    """

    fault: Fault
    due: float | None = None
    began: float | None = None
    ended: float | None = None
    proof: str = ""
    steps: bool = False
    idle: bool = False
    late: bool = False
    later: list[tuple[float, Callable[[], object]]] = field(default_factory=list)
    undo: list[Callable[[], object]] = field(default_factory=list)
    effective: Callable[[], bool] = lambda: True


class Injector:
    """Steps through a schedule's faults in order; they may overlap. One thread uses it."""

    def __init__(self, cluster: Cluster, proxy: Proxy, faults: tuple[Fault, ...]) -> None:
        self.records = [Record(fault) for fault in faults]
        self._cluster = cluster
        self._proxy = proxy
        self._slow = SLOW if cluster.options.tensorflow else 1
        self._step = 0
        self._moved: float | None = None
        self._last: float | None = None

    @property
    def over(self) -> bool:
        """Whether every fault was carried out and undone, so that the job may end. A fault of an
        unused link waits until the link is used again, and counts as over for that time."""
        waiting = [r for r in self.records if r.ended is None and r.fault.step != ENDING]
        return not waiting or waiting[0].idle

    @property
    def touched(self) -> set[str]:
        """The places that may have missed the end of the job."""
        targets = {target for record in self.records for target in record.fault.targets}
        if "coordinator" in targets:
            targets |= set(self._cluster.names)
        return {target.removeprefix("coordinator/") for target in targets}

    def advance(self, now: float, step: int, training: bool) -> None:
        """Does what is due."""
        if self._last is None:
            self._last = self._moved = now
        if step != self._step:
            self._step, self._moved = step, now
        for record in self.records:
            if record.began is not None and record.ended is None:
                self._go_on(record, now - record.began, now)
        waiting = next((record for record in self.records if record.began is None), None)
        if waiting is not None:
            self._consider(waiting, now, training)

    def _go_on(self, record: Record, age_s: float, now: float) -> None:
        while record.later and age_s >= record.later[0][0]:
            record.later.pop(0)[1]()
        lasts_s = record.fault.lasts_s
        if age_s >= lasts_s and (record.effective() or age_s >= lasts_s + VAIN_S * self._slow):
            for undo in record.undo:
                undo()
            record.ended = now
        record.idle = record.steps and age_s >= lasts_s and record.ended is None

    def _consider(self, record: Record, now: float, training: bool) -> None:
        assert self._last is not None
        assert self._moved is not None
        fault = record.fault
        if record.due is None and fault.step == ENDING:
            if any(r.ended is None for r in self.records if r is not record):
                return
            # From here on the job may end.
            record.due = now + fault.after_s
        elif record.due is None:
            patience_s = (PATIENCE_S if training else START_S) * self._slow
            patient = now - self._moved < patience_s
            if fault.step != STARTING and patient and (not training or self._step < fault.step):
                return
            record.due = max(now, self._last) + fault.after_s
        if now < record.due:
            return
        record.late = self._cluster.done
        if self._begin(record):
            record.began = self._last = now
            record.idle = False
        elif now > record.due + VAIN_S * self._slow or record.late:
            record.began = record.ended = self._last = now
        else:
            record.idle = now > record.due + IDLE_S

    # -- one fault ---------------------------------------------------------------------------

    def _begin(self, record: Record) -> bool:
        """False when there is nothing to hit yet."""
        fault = record.fault
        if fault.kind == "full":
            return self._fill(record)
        if fault.kind in ("kill", "drain", "stop", "replace"):
            found = [self._cluster.living(name)[-1:] for name in fault.targets]
            if not (any(found) if fault.step == ENDING else all(found)):
                return False
            processes = [process for some in found for process in some]
            hit = {
                "kill": self._kill,
                "drain": self._drain,
                "stop": self._stop,
                "replace": self._stop,
            }
            hit[fault.kind](record, processes)
            return True
        links = [self._cluster.link(name) for name in fault.targets]
        if not all(link.connections for link in links):
            return False
        self._disturb(record, links)
        return True

    def _kill(self, record: Record, processes: list[Process]) -> None:
        for process in processes:
            self._cluster.hold_back(process.name)
        hit = [p.name for p in processes if self._cluster.signal(p, signal.SIGKILL)]
        record.proof = f"killed {', '.join(hit)}" if hit else ""
        record.undo += [partial(self._cluster.let_go, process.name) for process in processes]

    def _drain(self, record: Record, processes: list[Process]) -> None:
        for process in processes:
            self._cluster.hold_back(process.name)
        told = [p for p in processes if self._cluster.signal(p, signal.SIGTERM)]

        def prove() -> None:
            left = [f"{p.name} ({p.status})" for p in told if p.status is not None]
            record.proof = f"drained {', '.join(left)}" if left else ""

        # Processes leave though the job stands still; but no code of a job's is interrupted, and a
        # coordinator waits for the batches that are under way, which may be behind the gate.
        leaves_later = any(process.name == "coordinator" for process in processes)
        record.steps = self._cluster.options.tensorflow or leaves_later
        record.effective = lambda: all(p.status is not None for p in told)
        record.undo += [prove, *(partial(self._cluster.let_go, p.name) for p in processes)]

    def _stop(self, record: Record, processes: list[Process]) -> None:
        for process in processes:
            if self._cluster.signal(process, signal.SIGSTOP) and is_stopped(process.pid, STOPPED_S):
                record.proof += f"stood still: {process.name}; "
        if record.fault.kind == "replace":
            # By then the place is free.
            record.later += [(REPLACE_S, partial(self._cluster.replace, p.name)) for p in processes]
        record.undo += [partial(self._wake, record.fault, process) for process in processes]

    def _wake(self, fault: Fault, process: Process) -> None:
        if fault.ends == "kill":
            self._cluster.signal(process, signal.SIGKILL)
            return
        self._cluster.signal(process, signal.SIGCONT)

    def _disturb(self, record: Record, links: list[Link]) -> None:
        fault = record.fault
        begin, finish, counted = {
            "reset": (Link.reset, None, "reset"),
            "partition": (Link.silence, Link.speak, "held"),
            "swallow": (Link.swallow, Link.spit, "swallowed"),
            "refuse": (Link.refuse, Link.welcome, "refused"),
        }[fault.kind]
        before = [getattr(link.counts, counted) for link in links]
        for link in links:
            self._proxy.do(partial(begin, link))

        def effects() -> list[int]:
            return [
                getattr(link.counts, counted) - was for link, was in zip(links, before, strict=True)
            ]

        def undo() -> None:
            for link in links:
                if fault.kind == "partition" and fault.ends == "reset":
                    self._proxy.do(link.reset)
                if finish is not None:
                    self._proxy.do(partial(finish, link))
            if any(effects()):
                record.proof = f"{counted} {effects()}"
            elif not any(link.connections for link in links):
                record.proof = "another fault has ended the connections"

        # Silence shows on links in use only.
        record.steps = True
        record.effective = lambda: any(effects()) or not any(link.connections for link in links)
        record.undo.append(undo)

    def _fill(self, record: Record) -> bool:
        run = self._cluster.folders.run
        # A job begins with a checkpoint, and cannot without.
        if not any((run / "checkpoints").glob("step-*")):
            return False
        filler = run / "filler"
        with filler.open("wb", buffering=0) as out:
            for size in (1 << 20, 1 << 12):
                try:
                    while out.write(bytes(size)) == size:
                        pass
                except OSError as error:
                    record.proof = f"after {out.tell()} bytes: {error.strerror}"
        self._cluster.full_until = math.inf

        def free() -> None:
            filler.unlink()
            self._cluster.full_until = time.monotonic() + FREE_S

        record.undo.append(free)
        return True
