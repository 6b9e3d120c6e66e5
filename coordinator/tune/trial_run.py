"""Runs of trials, and those of this machine: whole clusters that threads of it supervise."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from coordinator.launch.commands import UpOptions
from coordinator.launch.conclusion import Earlier, complete_summary
from coordinator.launch.fleet import Stamp, stamp
from coordinator.launch.options import LocalArguments
from coordinator.launch.restarts import Outcome
from coordinator.launch.shared_forks import SharedForks
from coordinator.launch.supervisor import Supervisor
from coordinator.launch.up import reserved_dashboard, run_credentials, supervised
from coordinator.records.tensorboard import EventWriter
from coordinator.search.points import Point, overrides_of
from coordinator.search.trials import TrialValue, read_history
from coordinator.tune.directory import StudyDirectory
from coordinator.tune.options import TuneArguments
from coordinator.tune.preparation import gpu_of, trial_overrides
from psrpc.core.errors import disk_reason
from psrpc.core.names import HISTORY, SUMMARY
from psrpc.files.durable import ensure_directory
from psrpc.files.run_paths import read_ending, read_summary
from psrpc.files.storage import read_bounded
from psrpc.ops.exit_status import DONE, FAILED
from psrpc.options.declaration import options_of
from psrpc.security.credentials import Security
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


class TrialRun(Protocol):
    """The cluster of one trial, wherever it runs. Its evaluations appear in ``history.csv`` of its
    run directory. Use it from one thread, once."""

    def start(self) -> None:
        """Begins the run, or goes on with it; a run that is done already ends at once."""
        ...

    def stop(self) -> None:
        """Ends the run as Ctrl-C does, with a checkpoint; a second call kills."""
        ...

    def end_early(self) -> None:
        """Ends the run as done, with a checkpoint of what it has trained."""
        ...

    def look(self) -> RunEnd | None:
        """Returns how the run has ended, once no process of it is left; None while there is one."""
        ...

    @property
    def dashboard(self) -> str:
        """The URL of the run's dashboard while its coordinator answers; empty without one."""
        ...

    @property
    def status(self) -> GetJobStatusResponse:
        """The newest status of its coordinator; empty while unknown."""
        ...


class LocalTrial:
    """A `TrialRun` on this machine."""

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
        """See :class:`TrialRun`."""
        if read_ending(self._options.run_dir).get("phase") == "done":
            self._end = RunEnd(DONE, "")
            return
        self._thread.start()

    def stop(self) -> None:
        """See :class:`TrialRun`."""
        with self._lock:
            self._stops += 1
            if self._supervisor is not None:
                self._supervisor.stop()

    def end_early(self) -> None:
        """See :class:`TrialRun`."""
        with self._lock:
            self._ends_early = True
            if self._supervisor is not None:
                self._supervisor.end_early()

    def look(self) -> RunEnd | None:
        """See :class:`TrialRun`."""
        if self._thread.ident is None or not self._thread.is_alive():
            if self._error is not None:
                raise self._error
            return self._end
        return None

    @property
    def dashboard(self) -> str:
        """See :class:`TrialRun`."""
        return self._dashboard if self.status.phase else ""

    @property
    def status(self) -> GetJobStatusResponse:
        """See :class:`TrialRun`."""
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


class LocalTrials:
    """Makes the runs of a study's trials on this machine."""

    def __init__(
        self,
        options: TuneArguments,
        job: str,
        directory: StudyDirectory,
        asked: Security,
        forks: SharedForks,
        note: Callable[[str], object],
        cores: int,
        gpus: int,
        dashboard: str | None = None,
    ) -> None:
        """``cores`` is how many the workers of one trial share; ``gpus`` how many the trials
        divide, 0 to leave the choice to ``--gpu``; ``dashboard`` is where the dashboards of the
        runs are, None for no dashboards."""
        self._options = options
        self._job = job
        self._directory = directory
        self._asked = asked
        self._forks = forks
        self._note = note
        self._cores = cores
        self._gpus = gpus
        self._dashboard = dashboard

    def launch(self, number: int, point: Point, slot: int) -> tuple[TrialRun, Path]:
        """See :data:`coordinator.tune.engine.Launcher`. Raises PsError or OSError."""
        options, run_dir = self._options, self._directory.trial(number)
        make_trial_directory(run_dir, point)
        said: dict[str, Any] = {
            each.name: getattr(options, each.name) for each in options_of(LocalArguments)
        }
        said["overrides"] = (*trial_overrides(options), *overrides_of(point))
        said["gpu"] = gpu_of(options, slot, self._gpus)
        up = UpOptions(
            self._job,
            **said,
            run_dir=run_dir,
            run_dir_given=True,
            goes_on=True,
            security=run_credentials(self._asked, self._job, run_dir, options.workers),
            dashboard=self._dashboard,
        )
        note = partial(self._warn, number)
        return LocalTrial(up, self._forks, self._cores, note), run_dir

    def _warn(self, number: int, line: str) -> None:
        self._note(f"trial {number}: {line}")


def make_trial_directory(run_dir: Path, point: Point) -> None:
    """Makes the run directory of a trial, with its settings for TensorBoard, unless it exists.
    Raises OSError."""
    if not run_dir.exists():
        ensure_directory(run_dir.absolute())
        with EventWriter(run_dir / "tensorboard") as writer:
            writer.hparams(point)
