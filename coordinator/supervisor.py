"""Runs one job as child processes: starts them in order, watches them, and stops them all."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from coordinator.children import Children, Exited
from coordinator.client import CoordinatorClient
from coordinator.commands import Cluster, Command
from coordinator.run_directory import ADDRESS
from coordinator.screen import Screen
from psrpc.errors import PsError
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse

TICK_S = 0.1
"""How soon an end of a child or a Ctrl-C is seen."""

STATUS_S = 0.5
"""Pause between two looks at the job's status."""

ANNOUNCE_S = 3.0
"""Pause between two words on what is awaited, before there is a status."""

TOLD_S = 1.0
"""How soon a coordinator that still serves leaves after it has told a shard or worker to leave."""

LEAVE_S = 30.0
"""How long the processes of a job that has ended may take to leave."""

STOP_S = 15.0
"""How long all may take to leave before they are killed; asked once more after half of it."""

LOG_LINES = 15
"""Lines of a dead process's log that are shown."""

_ENDED = ("done", "failed")
_LOG_LINE = re.compile(r'(\x1b\[\d+m)?\d{4}-\d\d-\d\d[T ]|\{"')


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        exit_status: 0 done, 1 failed, 2 bad input, 130 interrupted.
        reason: one line; empty when the job is done.
        details: what else to show of a failure: the user's traceback, the last lines of a log.
        own: the supervisor ended the job, so the coordinator cannot know the reason. Otherwise
            the coordinator's own word, in its summary, comes before ``reason``.
    """

    exit_status: int
    reason: str = ""
    details: list[str] = field(default_factory=list)
    own: bool = False


@dataclass(frozen=True)
class Verdict:
    """What the end of a shard or worker means for the job, and a line that says so."""

    kind: Literal["expected", "warn", "fail"]
    line: str = ""


def judge(exited: Exited, status: GetJobStatusResponse, workers_left: int) -> Verdict:
    """Whether a job goes on after a shard or worker has ended.

    Args:
        status: of the job, after that.
        workers_left: processes that still run.
    """
    if status.phase in _ENDED:
        return Verdict("expected")
    known_as = "".join(f", {w.worker} of the job" for w in status.workers if w.pid == exited.pid)
    who = f"{exited.name} (pid {exited.pid}{known_as})"
    what = f"{who} ended with {exited.how()}, see {exited.log}"
    if not exited.name.startswith("worker"):
        return Verdict("fail", f"{what}; a job cannot go on without all its shards")
    if not workers_left:
        return Verdict("fail", f"no worker is left: {what}")
    if exited.status == 0:
        return Verdict("expected")
    return Verdict("warn", f"{what}; {workers_left} left, the job goes on")


def plain_output(lines: list[str]) -> list[str]:
    """What a process said that is no structured log: error lines and tracebacks."""
    return [line for line in lines if not _LOG_LINE.match(line)]


class Supervisor:
    """Runs one job; use it once, from one thread.

    Children are started in the order coordinator, then all shards and workers as soon as the
    coordinator's address is known. A child that ends is not started again.
    """

    def __init__(self, cluster: Cluster, run_dir: Path, screen: Screen) -> None:
        self._cluster = cluster
        self._run_dir = run_dir
        self._screen = screen
        self._children = Children()
        self._status = GetJobStatusResponse()
        self._stop_requests = 0

    def stop(self) -> None:
        """Ends the job; a second call kills. For signal handlers."""
        self._stop_requests += 1

    def run(self) -> Outcome:
        """Blocks until the job has ended and no child is left.

        Raises:
            OSError: a process or its log cannot be started.
        """
        try:
            with self._children:
                found = self._start_coordinator()
                outcome = found if isinstance(found, Outcome) else self._run_members(found)
                self._wind_down(outcome)
        finally:
            self._screen.close()
        return outcome

    def _start(self, name: str, command: Command) -> None:
        log = self._run_dir / "logs" / f"{name}.log"
        self._children.start(name, command.arguments, log, command.environment)

    def _start_coordinator(self) -> str | Outcome:
        """Starts the coordinator and waits for its address. Before it serves it describes the
        job, which takes as long as the user's code takes."""
        file = self._run_dir / ADDRESS
        earlier = _stamp(file)
        self._start("coordinator", self._cluster.coordinator)
        began = said = time.monotonic()
        while not self._stop_requests:
            for exited in self._children.wait(TICK_S):
                return self._coordinator_ended(exited)
            if _stamp(file) not in (None, earlier):
                # It is gone again when the coordinator ended just now; the next turn will tell.
                with contextlib.suppress(FileNotFoundError):
                    return file.read_text().strip()
            now = time.monotonic()
            if now - said >= ANNOUNCE_S:
                said = now
                self._screen.note(
                    f"waiting for the coordinator to read the job ({now - began:.0f} s)"
                )
        return _interrupted()

    def _run_members(self, address: str) -> Outcome:
        for name, command in self._cluster.members(address).items():
            self._start(name, command)
        with CoordinatorClient(address) as client:
            return self._watch(client)

    def _watch(self, client: CoordinatorClient) -> Outcome:
        looked_at = 0.0
        served = True
        ended_at: float | None = None
        while not self._stop_requests:
            exits = self._children.wait(TICK_S)
            for exited in exits:
                if exited.name == "coordinator":
                    return self._coordinator_ended(exited)
            now = time.monotonic()
            if exits or now - looked_at >= STATUS_S:
                served = self._look(client)
                looked_at = now
            for exited in exits:
                failed = self._member_ended(exited, served)
                if failed is not None:
                    return failed
            if self._status.phase in _ENDED:
                ended_at = ended_at or now
                if now - ended_at > LEAVE_S:
                    reason = f"the coordinator did not leave within {LEAVE_S:.0f} s of the end"
                    return Outcome(1, self._status.reason or reason)
        return _interrupted()

    def _look(self, client: CoordinatorClient) -> bool:
        """Reads the job's status; False when the coordinator does not serve."""
        try:
            self._status = client.get_job_status()
        except PsError:
            # If it is gone its exit status will tell, and if it hangs, its shards and workers
            # will not wait for ever and tell by their own.
            return False
        self._screen.show(self._status)
        return True

    def _member_ended(self, exited: Exited, served: bool) -> Outcome | None:
        workers_left = sum(name.startswith("worker") for name in self._children.alive())
        verdict = judge(exited, self._status, workers_left)
        if verdict.kind == "warn":
            self._screen.note(f"warning: {verdict.line}")
        if verdict.kind != "fail":
            return None
        # The coordinator may have ended the job, and told this process to leave, after the last
        # look at its status; then its reason is the better one. One that serves no more is on
        # its way out, which takes as long as its last files take.
        if not served:
            self._screen.note("waiting for the coordinator to end")
        deadline = time.monotonic() + (TOLD_S if served else LEAVE_S)
        while time.monotonic() < deadline:
            for ended in self._children.wait(deadline - time.monotonic()):
                if ended.name == "coordinator":
                    return self._coordinator_ended(ended)
        self._screen.note(f"{verdict.line}; stopping")
        output = plain_output(exited.output()) or exited.output()
        status = 2 if exited.status == 2 else 1
        return Outcome(status, verdict.line, output[-LOG_LINES:], own=True)

    def _coordinator_ended(self, exited: Exited) -> Outcome:
        if exited.status == 0:
            return Outcome(0)
        if exited.status == 2:
            return Outcome(2, details=plain_output(exited.output()))
        reason = f"the coordinator (pid {exited.pid}) ended with {exited.how()}, see {exited.log}"
        return Outcome(max(exited.status, 1), reason, exited.output()[-LOG_LINES:])

    def _wind_down(self, outcome: Outcome) -> None:
        """Lets the others leave by themselves, asks those that do not, then kills."""
        if outcome.exit_status == 0 and self._status.phase:
            # Its last steps were made after the last look.
            self._status.phase = "done"
            self._status.global_step = self._status.total_steps
            self._status.waiting_for = ""
            self._screen.show(self._status)
        if outcome.own or outcome.exit_status == 130:
            self._children.terminate("coordinator")
        began = said = time.monotonic()
        asked = False
        while self._children.alive() and self._stop_requests < 2:
            self._children.wait(TICK_S)
            now = time.monotonic()
            if now - said >= ANNOUNCE_S:
                said = now
                self._screen.note(f"waiting for {', '.join(self._children.alive())} to end")
            if now - began >= STOP_S / 2 and not asked:
                asked = True
                for name in self._children.alive():
                    self._children.terminate(name)
            if now - began >= STOP_S:
                break
        self._children.kill()


def _interrupted() -> Outcome:
    return Outcome(130, "stopped by a signal", own=True)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Tells a file from the one that an earlier run left at the same place."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return (stat.st_ino, stat.st_mtime_ns)
