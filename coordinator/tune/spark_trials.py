"""Trials on Spark: each is one task, whose executor runs the whole cluster of the trial."""

from __future__ import annotations

import secrets
import signal
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from coordinator.launchers.spark import await_tasks, context_of
from coordinator.launchers.spark_job import EchoedProcess, MemberEnded, reason_of
from coordinator.search.points import Point
from coordinator.tune.command import check_study, run_trials, study_engine
from coordinator.tune.directory import StudyDirectory
from coordinator.tune.engine import StudyEngine, StudyScreen
from coordinator.tune.page import StudyPage
from coordinator.tune.preparation import prepare_study
from coordinator.tune.trial_process import (
    TrialStart,
    Wish,
    trial_answer,
    tune_arguments,
    write_wish,
)
from coordinator.tune.trial_run import RunEnd, TrialRun, make_trial_directory
from psrpc.core.text import counted
from psrpc.ops.exit_status import FAILED, INTERRUPTED
from psrpc.options.security_options import is_insecure
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse

MARK = "launch.spark"
"""A file of the study's directory with the id of the call. A task that reads this id there sees the
directory of the driver."""


@dataclass(frozen=True)
class TrialTask:
    """Runs a trial to its end; Spark's task calls it.

    Attributes:
        call: the id of the call of the study, the content of the file :data:`MARK`.
        arguments: those of ``coordinator tune``.
        directory: the driver's working directory; the trial runs there where it exists.
    """

    start: TrialStart
    call: str
    arguments: tuple[str, ...]
    directory: str

    def __call__(self, _index: int, _: Iterable[object]) -> Iterator[tuple[int, str]]:
        """Yields exit status and reason of the trial.

        Raises:
            MemberEnded: the trial has to be started again, or this executor does not see the
                directory of the study.
        """
        study, host = Path(self.start.study), socket.gethostname()
        if not (study / MARK).is_file() or (study / MARK).read_text() != self.call:
            raise MemberEnded(
                f"PS141: the executor on {host} does not see {study}; the directory of a study has "
                "to lie on a file system that the driver and all executors share"
            )
        run_dir = StudyDirectory(study).trial(self.start.number)
        process = EchoedProcess(self.start.command(self.arguments), self.directory)
        status = process.run()
        answer = trial_answer(run_dir, self.start.launch)
        if answer is None:
            ended = f"trial {self.start.number} on {host} ended with status {status}"
            raise MemberEnded(process.reason or ended)
        yield answer


class SparkTrial:
    """A `TrialRun` as a Spark job of one task."""

    def __init__(self, context: Any, task: TrialTask, run_dir: Path) -> None:
        self._context, self._task, self._run_dir = context, task, run_dir
        self._group = f"trial-{task.start.launch}"
        self._wish: Wish | None = None
        self._end: RunEnd | None = None
        self._thread: Thread | None = None

    def start(self) -> None:
        """See :class:`TrialRun`."""
        from pyspark import InheritableThread

        self._thread = InheritableThread(target=self._run, name=self._run_dir.name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """See :class:`TrialRun`."""
        if self._wish == "stop":
            self._context.cancelJobGroup(self._group)
            return
        self._wish = "stop"
        write_wish(self._run_dir, self._task.start.launch, "stop")

    def end_early(self) -> None:
        """See :class:`TrialRun`."""
        self._wish = "end early"
        write_wish(self._run_dir, self._task.start.launch, "end early")

    def look(self) -> RunEnd | None:
        """See :class:`TrialRun`."""
        return None if self._thread is not None and self._thread.is_alive() else self._end

    @property
    def dashboard(self) -> str:
        """See :class:`TrialRun`: empty, for the same reason."""
        return ""

    @property
    def status(self) -> GetJobStatusResponse:
        """See :class:`TrialRun`: empty, since the coordinator may listen on another machine."""
        return GetJobStatusResponse()

    def _run(self) -> None:
        name = f"trial {self._task.start.number}"
        # Without interrupts: they would leave the processes of killed tasks behind.
        self._context.setJobGroup(self._group, name, interruptOnCancel=False)
        try:
            task = self._context.parallelize([0], 1).mapPartitionsWithIndex(self._task)
            [(status, reason)] = task.collect()
            self._end = RunEnd(status, reason)
        except Exception as error:  # an error of py4j, which quotes Java
            words = reason_of(str(error))
            cancelled = "was cancelled" in words
            self._end = RunEnd(INTERRUPTED if cancelled else FAILED, words)


class SparkTrials:
    """Makes the runs of a study's trials on Spark."""

    def __init__(
        self, context: Any, directory: StudyDirectory, arguments: Sequence[str], cores: int
    ) -> None:
        """``arguments`` are those of ``coordinator tune``; ``cores`` is how many a task has."""
        self._context, self._directory = context, directory
        self._arguments, self._cores = tuple(arguments), cores
        self._call = secrets.token_hex(8)

    def mark(self) -> None:
        """Marks the directory of the study, for tasks to find. Raises OSError."""
        (self._directory.path / MARK).write_text(self._call)

    def launch(self, number: int, point: Point, _slot: int) -> tuple[TrialRun, Path]:
        """See :data:`coordinator.tune.engine.Launcher`. Raises OSError."""
        run_dir = self._directory.trial(number)
        make_trial_directory(run_dir, point)
        study = str(self._directory.path.absolute())
        start = TrialStart(study, number, point, secrets.token_hex(8), self._cores)
        task = TrialTask(start, self._call, self._arguments, str(Path.cwd()))
        return SparkTrial(self._context, task, run_dir), run_dir


def run_on_spark(spark: Any, arguments: Sequence[str]) -> tuple[int, str]:
    """Runs a study whose trials are tasks of Spark; returns exit status and reason.

    Args:
        spark: a ``SparkSession`` or ``SparkContext``.
        arguments: those of ``coordinator tune``, with ``--run-dir``.

    Raises:
        PsError: an option, the space, the job or Spark cannot be used; no trial was started.
        OSError: the directory of the study cannot be written.
    """
    context = context_of(spark)
    args, options = tune_arguments(arguments)
    check_study(options)
    # A notebook has an event loop in this thread, beside which the check cannot run its own.
    with ThreadPoolExecutor(1) as other:
        prepared = other.submit(prepare_study, options, args.job, None, elsewhere=True).result()
    asked = f"the study has --parallel {counted(options.parallel, 'trial')}"
    await_tasks(context, options.parallel, asked, options.connect_timeout_s)
    assert options.run_dir is not None
    with StudyDirectory(options.run_dir) as directory, ExitStack() as held:
        directory.settle(prepared.identity)
        cores = int(context.getConf().get("spark.task.cpus", "1"))
        trials = SparkTrials(context, directory, arguments, cores)
        trials.mark()

        def engine_of(screen: StudyScreen, page: StudyPage) -> StudyEngine:
            return study_engine(options, prepared, directory, trials.launch, screen, page)

        def hear(engine: StudyEngine) -> None:
            _hear(engine, held)

        insecure = is_insecure(args)
        return run_trials(prepared, directory, engine_of, hear, args.dashboard, insecure)


def _hear(engine: StudyEngine, held: ExitStack) -> None:
    """Stops the engine at stop signals of this process, until ``held`` is closed.

    The handlers replace pyspark's own, which ends all tasks at once on Ctrl-C. Other threads than
    the main one cannot set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return

    def stop(_number: int, _frame: object) -> None:
        # In a thread: a handler interrupts the main thread even while that holds a lock.
        threading.Thread(target=engine.stop, name="stop", daemon=True).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        held.callback(signal.signal, number, signal.signal(number, stop))
