"""Trials on Spark: each is one task, whose executor runs the whole cluster of the trial."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from coordinator.launchers.spark import await_tasks, context_of
from coordinator.launchers.spark_job import reason_of
from coordinator.studies.engine_trials import EngineTrials, TaskEnd, TrialTask
from coordinator.tune.command import StudySetting, check_study, reading, run_trials
from coordinator.tune.directory import StudyDirectory
from coordinator.tune.engine import Launcher, StudyEngine
from coordinator.tune.options import arguments_of, tune_arguments
from coordinator.tune.preparation import prepare_study
from psrpc.core.text import counted
from psrpc.options.security_options import from_arguments
from psrpc.security.identity import Role


@dataclass(frozen=True)
class SparkTrialTask:
    """Runs a trial, as the function of its task in Spark."""

    task: TrialTask

    def __call__(self, _index: int, _: Iterable[object]) -> Iterator[None]:
        """Yields nothing. Raises as :meth:`TrialTask.run` does."""
        self.task.run()
        yield from ()


class SparkTrialJob:
    """An `EngineTask` as a Spark job of one task, which Spark starts again when it is lost."""

    def __init__(self, context: Any, task: TrialTask) -> None:
        self._context, self._task = context, task
        self._group = f"trial-{task.start.launch}"
        self._end: TaskEnd | None = None
        self._thread: Thread | None = None

    def start(self) -> None:
        """See :class:`EngineTask`."""
        from pyspark import InheritableThread

        name = f"trial {self._task.start.number}"
        self._thread = InheritableThread(target=self._run, args=(name,), name=name, daemon=True)
        self._thread.start()

    def withdraw(self) -> None:
        """See :class:`EngineTask`: Spark does not tell whether a task has begun."""

    def cancel(self) -> None:
        """See :class:`EngineTask`."""
        self._context.cancelJobGroup(self._group)

    def look(self) -> TaskEnd | None:
        """See :class:`EngineTask`."""
        return None if self._thread is not None and self._thread.is_alive() else self._end

    def _run(self, name: str) -> None:
        # Without interrupts: they would leave the processes of killed tasks behind.
        self._context.setJobGroup(self._group, name, interruptOnCancel=False)
        try:
            self._context.parallelize([0], 1).mapPartitionsWithIndex(
                SparkTrialTask(self._task)
            ).collect()
            self._end = TaskEnd("Spark's task has ended without an answer", "given up")
        except Exception as error:  # an error of py4j, which quotes Java
            words = reason_of(str(error))
            self._end = TaskEnd(words, "cancelled" if "was cancelled" in words else "given up")


@dataclass(frozen=True)
class SparkEngine:
    """A `TrialEngine`."""

    context: Any

    @property
    def cores(self) -> int:
        """See :class:`TrialEngine`."""
        return int(self.context.getConf().get("spark.task.cpus", "1"))

    def left(self, _run_dir: Path) -> str:
        """See :class:`TrialEngine`: executors end with the driver."""
        return ""

    def task(self, task: TrialTask, _note: Callable[[str], object]) -> SparkTrialJob:
        """See :class:`TrialEngine`."""
        return SparkTrialJob(self.context, task)


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
    print(reading(args.job), flush=True)  # noqa: T201
    # A notebook has an event loop in this thread, beside which the check cannot run its own.
    with ThreadPoolExecutor(1) as other:
        prepared = other.submit(prepare_study, options, args.job, None, elsewhere=True).result()
    asked = f"the study has --parallel {counted(options.parallel, 'trial')}"
    await_tasks(context, options.parallel, asked, options.connect_timeout_s)
    assert options.run_dir is not None
    with StudyDirectory(options.run_dir) as directory, ExitStack() as held:
        directory.settle(prepared.identity)
        security = from_arguments(Role.OPERATOR, args)
        study = StudySetting(options, args.job, prepared, directory, security, args.dashboard)

        def launcher_of(note: Callable[[str], object]) -> Launcher:
            said = [args.job, *arguments_of(options)]
            return EngineTrials(SparkEngine(context), directory, said, note).launch

        return run_trials(study, launcher_of, lambda engine: _hear(engine, held))


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
