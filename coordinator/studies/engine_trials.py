"""Trials as tasks of an engine: each task runs the whole cluster of one trial on its machine."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from coordinator.launch.fleet import Stamp, stamp
from coordinator.launchers.task_process import EchoedProcess, MemberEnded
from coordinator.search.points import Point
from coordinator.studies.trial_process import TrialStart, Wish, trial_answer, write_wish
from coordinator.tune.directory import StudyDirectory
from coordinator.tune.engine import LauncherOf
from coordinator.tune.options import TuneArguments, arguments_of
from coordinator.tune.trial_run import RunEnd, TrialRun, make_trial_directory
from psrpc.core.names import HISTORY
from psrpc.files.run_paths import read_ending
from psrpc.ops.exit_status import DONE, FAILED, INTERRUPTED
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse

MARK = "launch.trials"
"""A file of the study's directory with the id of the call. A task that reads this id there sees the
directory of the study."""

LOSSES = 4
"""How many tasks of a trial may be lost in a row without an evaluation between them."""

LOOK_S = 60.0
"""Longest part of the wait for a trial's process."""

SHARED_S = 5.0
"""How long a file that another machine has just written may take to show up on a shared disk."""


@dataclass(frozen=True)
class TrialTask:
    """Runs a trial to its end, in a task of an engine.

    Attributes:
        call: the id of the call of the study, the content of the file :data:`MARK`.
        arguments: those of ``coordinator tune``.
        directory: the working directory of the study; the trial runs there where it exists.
    """

    start: TrialStart
    call: str
    arguments: tuple[str, ...]
    directory: str

    def run(self) -> None:
        """Blocks until the trial has answered.

        Raises:
            MemberEnded: the trial has to be started again, or this machine does not see the
                directory of the study.
        """
        study, host = Path(self.start.study), socket.gethostname()
        if not (study / MARK).is_file() or (study / MARK).read_text() != self.call:
            raise MemberEnded(unseen(host, study))
        process = EchoedProcess(self.start.command(self.arguments), self.directory)
        # Apart from a terminal, where Ctrl-C is the study's to hear.
        process.start()
        while (status := process.wait(LOOK_S)) is None:
            pass
        if trial_answer(self.start.run_dir, self.start.launch) is None:
            ended = f"trial {self.start.number} on {host} ended with status {status}"
            raise MemberEnded(process.reason or ended)


def unseen(host: str, study: Path) -> str:
    """Returns the error of a machine that does not see the directory of the study."""
    return (
        f"PS141: {host} does not see {study}; the directory of a study has to lie on a file system "
        "that this machine and those of the trials share"
    )


@dataclass(frozen=True)
class TaskEnd:
    """How the task of a trial has ended.

    Attributes:
        how: why there is no answer of the trial, if there is none.
        then: what follows from that: another task for ``lost``; the end of the study for
            ``cancelled``, as after Ctrl-C; the end of the trial for ``given up``.
    """

    how: str = ""
    then: Literal["lost", "cancelled", "given up"] = "lost"


class EngineTask(Protocol):
    """The task of a trial in an engine. Used from one thread."""

    def start(self) -> None:
        """Submits the task; again after it was lost. Raises LaunchFailed."""
        ...

    def withdraw(self) -> None:
        """Cancels the task if it has not begun yet, and the engine can tell."""
        ...

    def cancel(self) -> None:
        """Kills the task."""
        ...

    def look(self) -> TaskEnd | None:
        """Returns how the task has ended; None while it waits or runs."""
        ...


class TrialEngine(Protocol):
    """An engine that runs trials."""

    @property
    def cores(self) -> int:
        """How many cores the workers of one trial share."""
        ...

    def left(self, run_dir: Path) -> str:
        """Returns the launch id of a task that an earlier command has left behind, and that goes on
        without it; empty without one."""
        ...

    def task(self, task: TrialTask, note: Callable[[str], object]) -> EngineTask:
        """Makes the task of a trial; does not start it. ``note`` gets lines for the user."""
        ...


class EngineTrial:
    """A `TrialRun` in a task of an engine. It asks the trial to end by a file, and reads the answer
    from another one: the directory of the study is shared anyway, and no port has to be open."""

    def __init__(self, task: EngineTask, start: TrialStart, note: Callable[[str], object]) -> None:
        """``note`` gets a line for each lost task."""
        self._task, self._start, self._note = task, start, note
        self._run_dir = start.run_dir
        self._wish: Wish | None = None
        self._end: RunEnd | None = None
        self._losses = 0
        self._history: Stamp | None = None
        self._over_since: float | None = None

    def start(self) -> None:
        """See :class:`TrialRun`."""
        if read_ending(self._run_dir).get("phase") == "done":
            self._end = RunEnd(DONE, "")
            return
        self._history = stamp(self._run_dir / HISTORY)
        self._task.start()

    def stop(self) -> None:
        """See :class:`TrialRun`."""
        if self._wish == "stop":
            self._task.cancel()
            return
        self._ask("stop")
        self._task.withdraw()

    def end_early(self) -> None:
        """See :class:`TrialRun`."""
        self._ask("end early")

    def look(self) -> RunEnd | None:
        """See :class:`TrialRun`."""
        if self._end is not None:
            return self._end
        end = self._task.look()
        if end is None:
            return None
        if answer := trial_answer(self._run_dir, self._start.launch):
            self._end = RunEnd(*answer)
            return self._end
        now = time.monotonic()
        if self._over_since is None:
            self._over_since = now
        if end.then != "cancelled" and self._wish != "stop" and now - self._over_since < SHARED_S:
            return None
        self._over_since = None
        self._end = self._without_answer(end)
        return self._end

    def _without_answer(self, end: TaskEnd) -> RunEnd | None:
        """Starts the task again if it was lost; returns the end of the trial otherwise."""
        if end.then == "cancelled" or self._wish == "stop":
            return RunEnd(INTERRUPTED, end.how)
        written = stamp(self._run_dir / HISTORY)
        if written != self._history:
            self._losses, self._history = 0, written
        self._losses += 1
        if end.then == "given up" or self._losses >= LOSSES:
            again = f"{self._losses} tasks in a row without an evaluation, at last: "
            return RunEnd(FAILED, (again if end.then == "lost" else "") + end.how)
        self._note(f"trial {self._start.number}: {end.how}; it is started again")
        self._task.start()
        return None

    def _ask(self, wish: Wish) -> None:
        self._wish = wish
        write_wish(self._run_dir, self._start.launch, wish)

    @property
    def dashboard(self) -> str:
        """See :class:`TrialRun`: empty, since the coordinator may listen on another machine."""
        return ""

    @property
    def status(self) -> GetJobStatusResponse:
        """See :class:`TrialRun`: empty, for the same reason."""
        return GetJobStatusResponse()


@contextmanager
def task_trials(
    opened: Callable[[TuneArguments], AbstractContextManager[TrialEngine]],
    job: str,
    options: TuneArguments,
) -> Iterator[LauncherOf]:
    """Opens an engine that runs trials as its tasks, for the time of a study; yields what makes
    launchers. Raises as ``opened`` does."""
    with opened(options) as engine:
        said = [str(Path(job).absolute()), *arguments_of(options)]
        yield lambda directory, note: EngineTrials(engine, directory, said, note).launch


class EngineTrials:
    """Makes the runs of a study's trials in an engine."""

    def __init__(
        self,
        engine: TrialEngine,
        directory: StudyDirectory,
        arguments: Sequence[str],
        note: Callable[[str], object],
    ) -> None:
        """Marks the directory of the study, for tasks to find. Raises OSError.

        Args:
            arguments: those of ``coordinator tune``.
            note: gets a line for each lost task.
        """
        self._engine, self._directory, self._note = engine, directory, note
        self._arguments = tuple(arguments)
        self._call = secrets.token_hex(8)
        (directory.path / MARK).write_text(self._call)

    def launch(self, number: int, point: Point, _slot: int) -> tuple[TrialRun, Path]:
        """See :data:`coordinator.tune.engine.Launcher`. Raises OSError."""
        run_dir = self._directory.trial(number).absolute()
        make_trial_directory(run_dir, point)
        launch = self._engine.left(run_dir) or secrets.token_hex(8)
        study, cores = str(run_dir.parent), self._engine.cores
        start = TrialStart(study, number, point, launch, cores)
        task = TrialTask(start, self._call, self._arguments, str(Path.cwd()))
        return EngineTrial(self._engine.task(task, self._note), start, self._note), run_dir
