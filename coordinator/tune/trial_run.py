"""Runs a trial: a whole cluster, which a thread of this process supervises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator.launch.commands import UpOptions
from coordinator.launch.conclusion import Earlier, complete_summary
from coordinator.launch.fleet import Stamp, stamp
from coordinator.launch.restarts import Outcome
from coordinator.launch.shared_forks import SharedForks
from coordinator.launch.supervisor import Supervisor
from coordinator.launch.up import reserved_dashboard, supervised
from coordinator.search.trials import TrialValue, read_history
from psrpc.core.errors import disk_reason
from psrpc.core.names import HISTORY, SUMMARY
from psrpc.files.run_paths import read_ending, read_summary
from psrpc.files.storage import read_bounded
from psrpc.ops.exit_status import DONE, FAILED
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse

_WARNING = "warning: "


@dataclass(frozen=True)
class RunEnd:
    """How the run of a trial has ended: the exit status of ``coordinator up``, and why."""

    status: int
    reason: str


class TrialScreen:
    """The display of a trial's supervisor: keeps the status, which the study shows. Thread-safe."""

    def __init__(self, note: Callable[[str], object]) -> None:
        """``note`` gets warnings, on the thread of the trial."""
        self._note = note
        self.status = GetJobStatusResponse()

    def show(self, status: GetJobStatusResponse) -> None:
        """See :class:`coordinator.display.screen.Screen`."""
        self.status = status

    def note(self, line: str) -> None:
        """See :class:`coordinator.display.screen.Screen`: passes warnings on."""
        if line.startswith(_WARNING):
            self._note(line)

    def waiting(self, what: str, now: float) -> None:
        """See :class:`coordinator.display.screen.Screen`."""

    def close(self) -> None:
        """See :class:`coordinator.display.screen.Screen`."""


class TrialHistory:
    """The evaluations in the run directory of a trial. Not thread-safe."""

    def __init__(self, run_dir: Path, metric: str) -> None:
        self._path = run_dir / HISTORY
        self._metric = metric
        self._stamp: Stamp | None = None
        self._values: list[TrialValue] = []

    def values(self) -> list[TrialValue]:
        """Returns the values of the metric, in order; reads the file if it has changed."""
        try:
            now = stamp(self._path)
            if now != self._stamp:
                text = read_bounded(self._path).decode()
                self._values, self._stamp = read_history(text, self._metric), now
        except (OSError, ValueError):
            # The file is replaced as a whole, so a later call finds one that can be read.
            return self._values
        return self._values


class TrialRun:
    """The cluster of one trial. Use it from one thread, once."""

    def __init__(
        self, options: UpOptions, forks: SharedForks, cores: int, note: Callable[[str], object]
    ) -> None:
        """``cores`` is how many its workers share; ``note`` gets warnings on another thread."""
        self._options = options
        self._forks = forks
        self._cores = cores
        self._screen = TrialScreen(note)
        self._supervisor: Supervisor | None = None
        self._stops = 0
        self._ends_early = False
        self._lock = threading.Lock()
        self._end: RunEnd | None = None
        self._error: BaseException | None = None
        self._dashboard = ""
        # The kernel takes this thread for the parent of the processes, so they end with it.
        name = options.run_dir.name
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the processes, unless the run has ended already."""
        if read_ending(self._options.run_dir).get("phase") == "done":
            self._end = RunEnd(DONE, "")
            return
        self._thread.start()

    def stop(self) -> None:
        """Ends the run as Ctrl-C does, with a checkpoint; a second call kills."""
        with self._lock:
            self._stops += 1
            if self._supervisor is not None:
                self._supervisor.stop()

    def end_early(self) -> None:
        """Ends the run as done, with a checkpoint of what it has trained."""
        with self._lock:
            self._ends_early = True
            if self._supervisor is not None:
                self._supervisor.end_early()

    def look(self) -> RunEnd | None:
        """Returns how the run has ended, once no process of it is left; None while there is one."""
        if self._thread.ident is None or not self._thread.is_alive():
            if self._error is not None:
                raise self._error
            return self._end
        return None

    @property
    def dashboard(self) -> str:
        """The URL of the run's dashboard while its coordinator answers; empty without one."""
        return self._dashboard if self.status.phase else ""

    @property
    def status(self) -> GetJobStatusResponse:
        """The newest status of its coordinator."""
        return self._screen.status

    def _run(self) -> None:
        try:
            self._end = self._supervise()
        except BaseException as error:
            # `look` raises it, in the thread of the study.
            self._error = error

    def _supervise(self) -> RunEnd:
        run_dir, options = self._options.run_dir, self._options
        earlier = Earlier(stamp(run_dir / SUMMARY), read_summary(run_dir))
        try:
            with (
                reserved_dashboard(options) as options,
                self._forks.share() as share,
                supervised(options, self._screen, share, self._cores) as supervisor,
            ):
                self._dashboard = f"http://{options.dashboard}/" if options.dashboard else ""
                with self._lock:
                    self._supervisor = supervisor
                    for _ in range(self._stops):
                        supervisor.stop()
                    if self._ends_early:
                        supervisor.end_early()
                outcome = supervisor.run()
        except OSError as error:
            outcome = Outcome(FAILED, f"its processes cannot be started: {disk_reason(error)}")
        finally:
            self._dashboard = ""
        if outcome.refused:
            words = [line for line in outcome.details if line.strip()]
            return RunEnd(outcome.exit_status, words[-1] if words else "it was refused")
        ended = complete_summary(outcome, options, earlier)
        return RunEnd(ended.status, ended.reason)
