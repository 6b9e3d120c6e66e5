"""Watches the processes of a cluster in their Ray actors, and starts them again."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.core.lifecycle import STOPPED
from coordinator.launch.fleet import stamp
from coordinator.launch.process_health import COORDINATOR, is_worker
from coordinator.launch.restarts import Life, Restart, Restarts
from coordinator.launchers.ray_actor import GRACE_S, NodeVisit, ProcessEnd
from psrpc.core.errors import JobFailed, LaunchFailed, PsError
from psrpc.core.names import SUMMARY
from psrpc.files.run_paths import read_summary
from psrpc.net.channel import format_address
from psrpc.ops.exit_status import BAD_INPUT, DONE, INTERRUPTED
from psrpc.ops.logs import get_logger
from psrpc.ops.retry import Announcer

log = get_logger()

TICK_S = 0.5
"""Longest pause between two looks at deadlines and at processes that are due."""

LEAVE_S = 30.0
"""How long processes may take to leave after the job has ended."""

PAUSE_S = 1.5
"""Least pause before a process starts again. By then, an actor that drained at SIGTERM has exited,
and the driver knows whether a process left because the job is over."""

_LOST = -9
_SAME = "install tf-pserver in the same version on every node"
_ERROR = re.compile(r"error (PS\d{3}): ")


@dataclass(frozen=True)
class RayTask:
    """A process to run in an actor: the module, and its arguments without addresses."""

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


class RayDriver:
    """Runs one job; use it once, from one thread.

    Ray restarts actors, here or on another node. This loop starts processes in the actors and
    bounds how often: Ray sees neither exit statuses nor crash loops.
    """

    def __init__(
        self,
        tasks: Mapping[str, RayTask],
        actors: Mapping[str, Any],
        run_dir: Path,
        port: int,
        paths: Mapping[str, str],
        *,
        max_restarts: int,
        place_s: float,
    ) -> None:
        """Takes tasks and handles of `ProcessKeeper` actors by name of the process.

        Args:
            port: where the coordinator listens.
            paths: the paths that every node has to see, each with a description for messages.
            place_s: how long an actor may take to find a place.
        """
        self._tasks, self._actors, self._run_dir = tasks, actors, run_dir
        self._port, self._paths, self._place_s = port, paths, place_s
        self._restarts = Restarts(max_restarts)
        self._visits: dict[Any, str] = {}
        self._runs: dict[Any, str] = {}
        self._due: dict[str, float] = {}
        """When a process, or its first visit, is due; monotonic seconds."""
        self._until: dict[str, float] = {}
        self._unseen = set(tasks)
        """Processes whose first visit is not over: nothing starts before all nodes are checked."""
        self._why = ""
        self._given: dict[str, str] = {}
        self._address = ""
        self._left: set[str] = set()
        self._alone: float | None = None
        self._summary = stamp(run_dir / SUMMARY)
        self._over = False
        self._announcer = Announcer(
            lambda reason, waited_s: log.info(
                "waiting", waiting_for=reason, waited_s=round(waited_s)
            )
        )

    @property
    def restarts(self) -> dict[str, int]:
        """Restarts so far, by process."""
        return self._restarts.made

    def run(self) -> None:
        """Blocks until the job is done. Any other end drains the processes first.

        Raises:
            LaunchFailed: an actor finds no place, or its node does not see the run directory.
            JobFailed: the job failed, was refused or stopped, or cannot go on.
        """
        now = time.monotonic()
        self._due = dict.fromkeys(self._tasks, now)
        try:
            while not self._over:
                self._turn()
            self._wait_for_ends(LEAVE_S)
        except (PsError, KeyboardInterrupt, SystemExit) as error:
            if self._runs:
                log.info("draining", why=str(error) or type(error).__name__)
            raise
        finally:
            self._drain()

    def _turn(self) -> None:
        import ray

        now = time.monotonic()
        for name in [name for name, at in self._due.items() if at <= now]:
            del self._due[name]
            self._until.setdefault(name, now + self._place_s)
            visit = self._actors[name].visit.remote(str(Path.cwd()), list(self._paths))
            self._visits[visit] = name
        pending = [*self._visits, *self._runs]
        if not pending:
            time.sleep(TICK_S)
            return
        ready, _ = ray.wait(pending, timeout=TICK_S, fetch_local=False)
        for reference in ready:
            if reference in self._visits:
                self._visited(self._visits.pop(reference), self._result(reference))
            else:
                self._looked(self._runs.pop(reference), self._result(reference))
        self._check_waits()

    def _result(self, reference: Any) -> Any:
        """Returns the answer of an actor, or a `ProcessEnd` if the actor was lost."""
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return ray.get(reference, timeout=self._place_s)
        except RayActorError as error:
            if error.actor_init_failed:
                raise LaunchFailed(
                    f"an actor cannot begin: {_last_error(error)}; {_SAME}"
                ) from None
            return ProcessEnd(_LOST, "was lost with its actor", words=(_first_line(error),))
        except RayTaskError as error:
            raise LaunchFailed(f"an actor cannot run its process: {error.cause}") from None

    def _check_waits(self) -> None:
        now = time.monotonic()
        waiting = sorted(self._visits.values())
        if waiting:
            self._announcer.waiting(f"Ray to place {', '.join(waiting)}", now)
        else:
            self._announcer.over()
        late = [name for name, until in self._until.items() if until <= now]
        if late:
            raise LaunchFailed(
                f"Ray has found no place for {', '.join(late)} in {self._place_s:g} s{self._why}; "
                "see which nodes are there and what they have left: ray status"
            )
        if self._alone is not None and now >= self._alone:
            raise JobFailed("no worker is left, and the job is not done")

    # -- starts ------------------------------------------------------------------------------

    def _visited(self, name: str, found: NodeVisit | ProcessEnd) -> None:
        if isinstance(found, ProcessEnd):
            # The actor was lost. Visit it again: Ray restarts it, or the deadline passes.
            self._due[name], self._why = time.monotonic() + PAUSE_S, f": {found.words[0]}"
            return
        del self._until[name]
        for path in found.unseen:
            raise LaunchFailed(
                f"node {found.host} does not see {self._paths[path]}; it has to lie on a file "
                "system that all nodes share",
                code="PS141",
            )
        if name == COORDINATOR:
            self._moved_to(format_address(found.host, self._port))
        first = name in self._unseen
        self._unseen.discard(name)
        if not self._unseen:
            for each in self._tasks if first else (name,):
                self._start(each)

    def _moved_to(self, address: str) -> None:
        """Sets the coordinator's address; stops processes that have another, to start them anew."""
        self._address = address
        for name in self._runs.values():
            if self._given[name] != address:
                self._actors[name].stop.remote(GRACE_S)

    def _start(self, name: str) -> None:
        task, address = self._tasks[name], self._address
        option = "--bind" if name == COORDINATOR else "--coordinator"
        self._given[name] = address
        path = str(self._run_dir / "logs" / f"{name}.log")
        arguments = [*task.arguments, option, address]
        run = self._actors[name].start.remote(task.module, arguments, path, dict(task.environment))
        self._runs[run] = name
        log.info("started", process=name, log=path)

    # -- ends --------------------------------------------------------------------------------

    def _looked(self, name: str, end: ProcessEnd | None) -> None:
        if end is None:
            self._runs[self._actors[name].look.remote()] = name
        elif name == COORDINATOR:
            self._coordinator_ended(end)
        elif self._given[name] != self._address:
            log.info("started again", process=name, why="the coordinator has another address")
            self._due[name] = time.monotonic() + PAUSE_S
        elif end.status == DONE or (end.status == INTERRUPTED and is_worker(name)):
            # The process has heard that the job is over, or was asked to leave.
            self._left.add(name)
            self._count_workers()
        else:
            self._again(name, end)

    def _coordinator_ended(self, end: ProcessEnd) -> None:
        path = self._run_dir / SUMMARY
        summary = read_summary(self._run_dir)
        recorded = stamp(path) not in (None, self._summary)
        if end.status == DONE or (recorded and summary.get("phase") == "done"):
            self._over = True
        elif end.status == INTERRUPTED:
            raise JobFailed(f"the job was stopped: {summary.get('reason') or STOPPED}")
        elif recorded and summary.get("reason"):
            raise JobFailed(str(summary["reason"]))
        else:
            self._again(COORDINATOR, end)

    def _again(self, name: str, end: ProcessEnd) -> None:
        """Starts a process again if allowed. Raises JobFailed if not and the job needs it."""
        words = end.words[-1] if end.words else ""
        decision = self._restarts.ended(Life(name, end.status, end.how, end.lived_s, words))
        if isinstance(decision, Restart):
            log.warning("started again", process=name, why=end.how, which=decision.reason)
            self._due[name] = time.monotonic() + max(decision.after_s, PAUSE_S)
            return
        self._left.add(name)
        others = any(map(is_worker, self._tasks.keys() - self._left))
        said = next((line for line in reversed(end.words) if _ERROR.match(line)), words)
        # The last code is the cause's: "error PS106: the coordinator refuses: error PS105: ...".
        codes = ["", *_ERROR.findall(said)]
        reason = f"{name} {end.how}" + (f": {_ERROR.sub('', said, 1)}" if said else "")
        if end.status != BAD_INPUT:
            reason += f"; it is not started again: {decision.reason}"
        if not is_worker(name) or not others:
            raise JobFailed(reason, code=codes[-1])
        log.warning("not started again", process=name, why=reason)

    def _count_workers(self) -> None:
        if not any(map(is_worker, self._tasks.keys() - self._left)) and self._alone is None:
            self._alone = time.monotonic() + LEAVE_S

    def _wait_for_ends(self, seconds: float) -> None:
        """Waits up to ``seconds`` until all processes have ended, with any status."""
        import ray

        deadline = time.monotonic() + seconds
        while self._runs and time.monotonic() < deadline:
            ready, _ = ray.wait(list(self._runs), timeout=TICK_S, fetch_local=False)
            for reference in ready:
                name = self._runs.pop(reference)
                with suppress(LaunchFailed):
                    if self._result(reference) is None:
                        self._runs[self._actors[name].look.remote()] = name

    def _drain(self) -> None:
        for name in self._runs.values():
            self._actors[name].stop.remote(GRACE_S)
        self._wait_for_ends(GRACE_S + LEAVE_S)


def _last_error(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in reversed(lines) if "Error: " in line), lines[0])


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
