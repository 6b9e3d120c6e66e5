"""Runs one job as child processes: starts them in order, starts those again that die or hang, and
stops them all."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from coordinator.children import Children, Exited
from coordinator.commands import Cluster
from coordinator.lookout import Look, Lookout
from coordinator.outcome import BAD_INPUT, FAILED, INTERRUPTED, Outcome
from coordinator.restarts import MAX_RESTARTS, Life, Restart, Restarts
from coordinator.result import read_summary
from coordinator.run_directory import ADDRESS
from coordinator.screen import Screen
from coordinator.summary import NAME
from coordinator.vitals import COORDINATOR, Vitals, registrations
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse
from psrpc.waiting import Announcer

TICK_S = 0.05
"""How soon an end of a child or a Ctrl-C is seen."""

LEAVE_S = 30.0
"""How long the processes of a job that has ended may take to leave."""

DRAIN_S = 120.0
"""How long the coordinator may take to end a job that is stopped: it writes a checkpoint."""

STOP_S = 15.0
"""How long all may take to leave before they are killed; asked once more after half of it."""

LOG_LINES = 15
"""Lines of a dead process's log that are shown."""

_ENDED = ("done", "failed")
"""Phases in which nothing is needed any more."""


@dataclass(frozen=True, slots=True)
class _Death:
    """A child that has ended, ``at`` monotonic seconds."""

    exited: Exited
    how: str
    lived_s: float
    at: float

    @property
    def name(self) -> str:
        return self.exited.name

    @property
    def is_workers(self) -> bool:
        return self.name.startswith("worker")

    def __str__(self) -> str:
        return f"{self.name} (pid {self.exited.pid}) {self.how}, see {self.exited.log}"


class Supervisor:
    """Runs one job; use it once, from one thread.

    Children are started in the order coordinator, then all shards and workers as soon as it
    serves. One that dies or hangs before the job has ended is killed with all that it started, and
    started again, as often as :class:`Restarts` allows; the others keep running meanwhile.
    """

    def __init__(
        self, cluster: Cluster, run_dir: Path, screen: Screen, max_restarts: int = MAX_RESTARTS
    ) -> None:
        self._cluster = cluster
        self._run_dir = run_dir
        self._screen = screen
        self._children = Children()
        self._vitals = Vitals()
        self._restarts = Restarts(max_restarts)
        self._due: dict[str, float] = {}
        self._deaths: list[_Death] = []
        self._dead_workers: dict[int, str] = {}
        self._lookout: Lookout | None = None
        self._look: Look | None = None
        self._status = GetJobStatusResponse()
        self._served = False
        self._ended_at: float | None = None
        self._stop_requests = 0
        self._address: tuple[int, int] | None = None
        self._summary = _stamp(run_dir / NAME)
        self._awaiting = Announcer(
            lambda what, waited_s: screen.note(f"waiting for {what} ({waited_s:.0f} s)")
        )

    def stop(self) -> None:
        """Ends the job with a checkpoint; a second call kills. For signal handlers."""
        self._stop_requests += 1

    def run(self) -> Outcome:
        """Blocks until the job has ended and no child is left.

        Raises:
            OSError: a process or its log cannot be started.
        """
        try:
            with self._children:
                outcome = self._supervise()
                self._wind_down(outcome)
        finally:
            self._close_lookout()
            self._screen.close()
        return replace(outcome, restarts=self._restarts.made)

    def _supervise(self) -> Outcome:
        self._start(COORDINATOR)
        while not self._stop_requests:
            outcome = self._turn()
            if outcome is not None:
                return outcome
        return self._drain()

    def _turn(self) -> Outcome | None:
        for exited in self._children.wait(TICK_S):
            outcome = self._ended(exited, f"ended with {exited.how()}")
            if outcome is not None:
                return outcome
        now = time.monotonic()
        self._expect_coordinator(now)
        self._read_look()
        if self._status.phase in _ENDED:
            return self._overdue(now)
        self._ended_at = None
        if self._status.phase == "stopping":
            return None
        for name, why in self._vitals.hung(self._children.stopped(), now).items():
            outcome = self._ended(self._children.kill_one(name), f"{why} and was killed")
            if outcome is not None:
                return outcome
        for name in [name for name, at in self._due.items() if at <= now]:
            del self._due[name]
            self._start(name)
        return self._judge_deaths()

    # -- starting ----------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        if name == COORDINATOR:
            command = self._cluster.coordinator
            self._address = _stamp(self._run_dir / ADDRESS)
        else:
            command = self._cluster.members[name]
        log = self._run_dir / "logs" / f"{name}.log"
        pid = self._children.start(name, command.arguments, log, command.environment)
        self._dead_workers.pop(pid, None)
        self._vitals.started(name, pid, time.monotonic())

    def _expect_coordinator(self, now: float) -> None:
        """Before it serves it describes the job, which takes as long as the user's code takes."""
        if self._lookout is not None or COORDINATOR not in self._children.alive():
            return
        if _stamp(self._run_dir / ADDRESS) in (None, self._address):
            self._awaiting.waiting("the coordinator to read the job", now)
            return
        self._awaiting.over()
        self._vitals.serves(now)
        # A new connection: the old one would wait before it tries the address again.
        self._lookout = Lookout(self._cluster.address)
        self._lookout.start()
        if not self._served:
            self._served = True
            for name in self._cluster.members:
                self._start(name)

    def _read_look(self) -> None:
        look = self._lookout.newest if self._lookout is not None else None
        if look is None or look is self._look or self._lookout is None:
            return
        self._look, self._status = look, look.status
        self._screen.show(look.status)
        self._vitals.answered(look.status, look.began)
        for pid, how in self._dead_workers.items():
            for worker in registrations(look.status, pid):
                if worker.state != "left":
                    self._lookout.worker_is_gone(worker, how)

    # -- ends --------------------------------------------------------------------------------

    def _ended(self, exited: Exited, how: str) -> Outcome | None:
        now = time.monotonic()
        death = _Death(exited, how, self._vitals.ended(exited.name, now), now)
        if death.name == COORDINATOR:
            self._close_lookout()
            return self._coordinator_ended(death)
        if death.is_workers:
            self._dead_workers[exited.pid] = how
        self._deaths.append(death)
        if self._lookout is not None:
            self._lookout.look()
        return None

    def _coordinator_ended(self, death: _Death) -> Outcome | None:
        exited = death.exited
        if exited.status == 0:
            return Outcome(0)
        if exited.status == BAD_INPUT and not (self._served or self._restarts.made):
            return Outcome(BAD_INPUT, details=exited.words())
        if _stamp(self._run_dir / NAME) != self._summary:
            # It wrote what the job came to, and ended it.
            done = read_summary(self._run_dir).get("phase") == "done"
            status = INTERRUPTED if exited.status == INTERRUPTED else FAILED
            return Outcome(0) if done else Outcome(status, str(death), _last_words(exited))
        if self._status.phase == "stopping":
            return Outcome(FAILED, str(death), _last_words(exited))
        # The next one will say how the job stands.
        self._status = GetJobStatusResponse()
        return self._again(death, "a job cannot go on without its coordinator")

    def _judge_deaths(self) -> Outcome | None:
        deaths, self._deaths = self._deaths, []
        for death in deaths:
            asked_since = self._look is not None and self._look.began > death.at
            if death.exited.status >= 0 and not asked_since:
                # It may have left because the job has ended; somebody who was killed did not.
                self._deaths.append(death)
                continue
            outcome = self._member_ended(death)
            if outcome is not None:
                return outcome
        return None

    def _member_ended(self, death: _Death) -> Outcome | None:
        if not death.is_workers:
            return self._again(death, "a job cannot go on without all its shards")
        workers = sum(name.startswith("worker") for name in (*self._children.alive(), *self._due))
        if death.exited.status == 0:
            # It has left by itself.
            return None if workers else self._fail(death, f"no worker is left: {death}")
        return self._again(death, "" if workers else "no worker is left", f"{workers} left")

    def _again(self, death: _Death, fatal: str, left: str = "") -> Outcome | None:
        """Starts it again, if it may be; otherwise the job fails, if that is ``fatal``."""
        exited = death.exited
        words = exited.words()
        decision = self._restarts.ended(
            Life(death.name, exited.status, death.how, death.lived_s, words[-1] if words else "")
        )
        if isinstance(decision, Restart):
            self._due[death.name] = death.at + decision.after_s
            when = f" in {decision.after_s:.1f} s" if decision.after_s else ""
            self._screen.note(f"warning: {death}; it is started again{when}, {decision.reason}")
            return None
        line = f"{death}; it is not started again: {decision.reason}"
        if not fatal:
            self._screen.note(f"warning: {line}; {left}, the job goes on")
            return None
        return self._fail(death, f"{line}; {fatal}")

    def _fail(self, death: _Death, reason: str) -> Outcome:
        status = BAD_INPUT if death.exited.status == BAD_INPUT else FAILED
        return Outcome(status, reason, _last_words(death.exited), own=True)

    def _overdue(self, now: float) -> Outcome | None:
        self._ended_at = now if self._ended_at is None else self._ended_at
        if now - self._ended_at <= LEAVE_S:
            return None
        reason = f"the coordinator did not leave within {LEAVE_S:.0f} s of the end"
        return Outcome(FAILED, self._status.reason or reason)

    # -- stopping ----------------------------------------------------------------------------

    def _drain(self) -> Outcome:
        """Lets the coordinator end the job, which tells all others."""
        self._screen.note("stopping: a checkpoint is written (Ctrl-C again to stop at once)")
        self._children.terminate(COORDINATOR)
        deadline = time.monotonic() + DRAIN_S
        interrupted = Outcome(INTERRUPTED, "stopped by a signal", own=True)
        while COORDINATOR in self._children.alive() and self._stop_requests < 2:
            for exited in self._children.wait(TICK_S):
                if exited.name == COORDINATOR and exited.status == 0:
                    return Outcome(0)
            now = time.monotonic()
            self._read_look()
            self._awaiting.waiting("the coordinator to write a checkpoint and to end", now)
            if now >= deadline:
                break
        return interrupted

    def _wind_down(self, outcome: Outcome) -> None:
        """Lets the others leave by themselves, asks those that do not, then kills."""
        self._screen_shows_the_end(outcome)
        if outcome.own:
            self._children.terminate(COORDINATOR)
        began = time.monotonic()
        awaiting, asked = Announcer(lambda what, _: self._screen.note(f"waiting for {what}")), False
        while self._children.alive() and self._stop_requests < 2:
            self._children.wait(TICK_S)
            now = time.monotonic()
            awaiting.waiting(f"{', '.join(self._children.alive())} to end", now)
            untold = outcome.own and COORDINATOR not in self._children.alive()
            if not asked and (untold or now - began >= STOP_S / 2):
                asked = True
                for name in self._children.alive():
                    self._children.terminate(name)
            if now - began >= STOP_S:
                break
        self._children.kill()

    def _screen_shows_the_end(self, outcome: Outcome) -> None:
        if outcome.exit_status == 0 and self._status.phase:
            # Its last steps were made after the last look.
            self._status.phase = "done"
            self._status.global_step = self._status.total_steps
            self._status.waiting_for = ""
            self._screen.show(self._status)

    def _close_lookout(self) -> None:
        if self._lookout is not None:
            self._lookout.stop()
            self._lookout = None


def _last_words(exited: Exited) -> list[str]:
    return (exited.words() or exited.output())[-LOG_LINES:]


def _stamp(path: Path) -> tuple[int, int] | None:
    """Tells a file from the one that was there before at the same place."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return (stat.st_ino, stat.st_mtime_ns)
