"""Runs one job as child processes: starts them in order, restarts those that die or hang, and stops
them all."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from coordinator.core.lifecycle import ENDED, OVER, STOPPED, STOPPED_FOR
from coordinator.display.screen import Screen
from coordinator.launch.commands import ClusterCommands
from coordinator.launch.fleet import Death, Fleet, stamp
from coordinator.launch.process_health import COORDINATOR, is_worker
from coordinator.launch.restarts import MAX_RESTARTS, Life, Outcome, Restart, Restarts, is_refusal
from coordinator.launch.warm_start import ForkSource
from psrpc.core.names import SUMMARY
from psrpc.files.run_paths import read_summary
from psrpc.ops.exit_status import BAD_INPUT, DONE, DRAINED, FAILED, INTERRUPTED, RESTARTS
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse

TICK_S = 0.05
"""Longest delay before the supervisor notices the end of a child or a Ctrl-C."""

LEAVE_S = 30.0
"""How long the processes may take to leave after the job has ended."""

DRAIN_S = 120.0
"""How long the coordinator may take to stop a job, which includes writing a checkpoint."""

STOP_S = 15.0
"""How long all processes may take to leave before they are killed; half of it passes before they
get SIGTERM."""

_UNTRAINED = ("", "waiting", "initializing")
"""Phases before the first step; the empty one means that the coordinator reads its job."""


class Supervisor:
    """Runs one job; use it once, from one thread.

    Starts the coordinator first, and all shards and workers once it serves. A process that dies or
    hangs before the job has ended is killed with its descendants and started again, as often as
    :class:`Restarts` allows; the others keep running meanwhile.
    """

    def __init__(
        self,
        cluster: ClusterCommands,
        run_dir: Path,
        screen: Screen,
        max_restarts: int = MAX_RESTARTS,
        warm_start: ForkSource | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._screen = screen
        self._fleet = Fleet(cluster, run_dir, warm_start, screen.note)
        self._restarts = Restarts(max_restarts)
        self._due: dict[str, float] = {}
        self._deaths: list[Death] = []
        self._status = GetJobStatusResponse()
        self._served = False
        self._started_again = False
        self._ended_at: float | None = None
        self._stop_requests = 0
        self._summary = stamp(run_dir / SUMMARY)

    def stop(self) -> None:
        """Ends the job with a checkpoint; a second call kills. For signal handlers."""
        self._stop_requests += 1

    def end_early(self) -> None:
        """Ends the job as done; see :meth:`Fleet.end_early`. Thread-safe."""
        self._fleet.end_early()

    def run(self) -> Outcome:
        """Blocks until the job has ended and no child is left.

        Raises:
            OSError: a process or its log cannot be opened.
        """
        try:
            with self._fleet:
                outcome = self._until_over()
        finally:
            self._screen.close()
        return replace(outcome, restarts=self._restarts.made)

    def _until_over(self) -> Outcome:
        while True:
            outcome = self._supervise()
            self._wind_down(outcome)
            if outcome.exit_status != RESTARTS:
                return outcome
            if self._stop_requests:
                return Outcome(INTERRUPTED, STOPPED, own=True)
            self._start_again()

    def _start_again(self) -> None:
        """Prepares another start of all processes; the coordinator knows what has changed."""
        self._fleet.end_all()
        ended = read_summary(self._run_dir)
        changed = str(ended.get("reason") or "").removeprefix(STOPPED_FOR)
        step = ended.get("global_step") or 0
        self._screen.note(f"{changed}: the cluster starts again from step {step}")
        self._summary = stamp(self._run_dir / SUMMARY)
        self._status, self._ended_at = GetJobStatusResponse(), None
        self._served, self._started_again = False, True
        self._due.clear()
        self._deaths.clear()

    def _supervise(self) -> Outcome:
        self._fleet.start(COORDINATOR)
        while not self._stop_requests:
            outcome = self._turn()
            if outcome is not None:
                return outcome
        return self._drain()

    def _turn(self) -> Outcome | None:
        for death in self._fleet.wait(TICK_S):
            outcome = self._ended(death)
            if outcome is not None:
                return outcome
        now = time.monotonic()
        self._expect_coordinator(now)
        self._read_look()
        if self._status.phase in ENDED:
            return self._overdue(now)
        self._ended_at = None
        if self._status.phase == "stopping":
            return None
        for death in self._fleet.kill_hung():
            outcome = self._ended(death)
            if outcome is not None:
                return outcome
        self._start_due(now)
        return self._judge_deaths()

    def _start_due(self, now: float) -> None:
        """Starts the processes whose time has come, except those that wait for an import."""
        for name in [name for name, at in self._due.items() if at <= now]:
            if not self._fleet.waits_for_import(name):
                del self._due[name]
                self._fleet.start(name)

    def _expect_coordinator(self, now: float) -> None:
        """Starts shards and workers once the coordinator serves. Before that the coordinator
        describes the job, which takes as long as the user's code takes."""
        if not self._fleet.serves:
            self._screen.waiting("the coordinator to read the job", now)
            return
        if not self._served:
            self._served = True
            self._due.update(dict.fromkeys(self._fleet.members(), now))
            self._start_due(now)
        late = any(at <= now and self._fleet.waits_for_import(n) for n, at in self._due.items())
        self._screen.waiting("TensorFlow to be imported" if late else "", now)

    def _read_look(self) -> None:
        look = self._fleet.read_look()
        if look is not None:
            self._status = look.status
            self._screen.show(look.status)

    # -- ends --------------------------------------------------------------------------------

    def _ended(self, death: Death) -> Outcome | None:
        if death.name == COORDINATOR:
            return self._coordinator_ended(death)
        self._deaths.append(death)
        return None

    def _coordinator_ended(self, death: Death) -> Outcome | None:
        exited = death.exited
        if exited.status == 0:
            return Outcome(0)
        begun = self._served or self._started_again or self._restarts.made
        if not begun and is_refusal(exited.status, exited.words()):
            return Outcome(exited.status, details=exited.words())
        if exited.status == INTERRUPTED:
            return Outcome(INTERRUPTED, STOPPED)
        drained = exited.status == DRAINED
        recorded = stamp(self._run_dir / SUMMARY) not in (None, self._summary)
        phase = read_summary(self._run_dir).get("phase") if recorded else None
        if phase == "done":
            return Outcome(0)
        if exited.status == RESTARTS or phase == "restarting":
            return Outcome(RESTARTS)
        if recorded or (self._status.phase == "stopping" and not drained):
            return Outcome(FAILED, str(death), exited.last_words())
        # The next coordinator will report the state of the job.
        self._status = GetJobStatusResponse()
        return self._again(death, "a job cannot go on without its coordinator")

    def _judge_deaths(self) -> Outcome | None:
        look = self._fleet.newest
        for death in list(self._deaths):
            # A process that exited may have left because the job has ended, which only a later
            # status can tell; a process killed by a signal did not leave.
            asked_since = look is not None and look.began > death.at
            if death.exited.status >= 0 and not asked_since:
                continue
            self._deaths.remove(death)
            outcome = self._member_ended(death)
            if outcome is not None:
                return outcome
        return None

    def _member_ended(self, death: Death) -> Outcome | None:
        if not is_worker(death.name):
            return self._again(death, "a job cannot go on without all its shards")
        others = (*self._fleet.alive, *self._due, *(other.name for other in self._deaths))
        workers = sum(map(is_worker, others))
        if death.exited.status in (DONE, DRAINED, INTERRUPTED):
            # The worker left by itself, or was asked to leave.
            return None if workers else self._fail(death, f"no worker is left: {death}")
        return self._again(death, "" if workers else "no worker is left", f"{workers} left")

    def _again(self, death: Death, fatal: str, left: str = "") -> Outcome | None:
        """Starts a process again if allowed; otherwise fails the job, unless ``fatal`` is empty."""
        exited = death.exited
        words = exited.words()
        decision = self._restarts.ended(
            Life(death.name, exited.status, death.how, death.lived_s, words[-1] if words else "")
        )
        if isinstance(decision, Restart):
            self._due[death.name] = death.at + decision.after_s
            when = f" in {decision.after_s:.1f} s" if decision.after_s else ""
            why = f": {words[-1]}" if words and words[-1].startswith("error PS") else ""
            self._screen.note(
                f"warning: {death}{why}; it is started again{when}, {decision.reason}"
            )
            return None
        line = f"{death}; it is not started again: {decision.reason}"
        if not fatal:
            self._screen.note(f"warning: {line}; {left}, the job goes on")
            return None
        return self._fail(death, f"{line}; {fatal}")

    def _fail(self, death: Death, reason: str) -> Outcome:
        status = BAD_INPUT if death.exited.status == BAD_INPUT else FAILED
        return Outcome(status, reason, death.exited.last_words(), own=True)

    def _overdue(self, now: float) -> Outcome | None:
        self._ended_at = now if self._ended_at is None else self._ended_at
        if now - self._ended_at <= LEAVE_S:
            return None
        reason = f"the coordinator did not leave within {LEAVE_S:.0f} s of the end"
        return Outcome(FAILED, self._status.reason or reason)

    # -- stopping ----------------------------------------------------------------------------

    def _drain(self) -> Outcome:
        """Lets the coordinator end the job, unless it has; it then tells the other processes."""
        over = self._status.phase in OVER
        begun = self._status.phase not in (*_UNTRAINED, *OVER)
        none = "all is saved" if self._started_again else "there is nothing to save yet"
        what = "the job is over" if over else "a checkpoint is written" if begun else none
        self._screen.note(f"stopping: {what} (Ctrl-C again to stop at once)")
        if not over:
            self._fleet.terminate(COORDINATOR)
        deadline = time.monotonic() + DRAIN_S
        while COORDINATOR in self._fleet.alive and self._stop_requests < 2:
            for death in self._fleet.wait(TICK_S):
                if death.name == COORDINATOR:
                    return Outcome.after_stop(death.exited.status, death.exited.log)
            self._read_look()
            saving = "write a checkpoint and to " if begun else ""
            self._screen.waiting(f"the coordinator to {saving}end", time.monotonic())
            if time.monotonic() >= deadline:
                break
        return Outcome(INTERRUPTED, STOPPED, own=True)

    def _wind_down(self, outcome: Outcome) -> None:
        """Lets the remaining processes leave by themselves, then sends SIGTERM, then kills them."""
        self._screen_shows_the_end(outcome)
        if outcome.own:
            self._fleet.terminate(COORDINATOR)
        began = time.monotonic()
        terminated = False
        while self._fleet.alive and self._stop_requests < 2:
            self._fleet.wait(TICK_S)
            now = time.monotonic()
            self._screen.waiting(f"{', '.join(self._fleet.alive)} to end", now)
            untold = outcome.own and COORDINATOR not in self._fleet.alive
            if not terminated and (untold or now - began >= STOP_S / 2):
                terminated = True
                for name in self._fleet.alive:
                    self._fleet.terminate(name)
            if now - began >= STOP_S:
                break

    def _screen_shows_the_end(self, outcome: Outcome) -> None:
        if outcome.exit_status == 0 and self._status.phase:
            # The last steps came after the last status.
            self._status.phase = "done"
            self._status.global_step = self._status.total_steps
            self._status.waiting_for = ""
            self._screen.show(self._status)
