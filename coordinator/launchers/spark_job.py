"""The Spark job of a cluster: shards and workers, each the process of one task."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.launchers.plan import LaunchPlan
from coordinator.launchers.task_process import EchoedProcess, MemberEnded
from psrpc.core.errors import LaunchFailed
from psrpc.core.text import counted
from psrpc.ops.exit_status import BAD_INPUT, DONE, INTERRUPTED
from psrpc.ops.process import module_command

MARK = "launch.spark"
"""A file in the run directory with the id of the launch. A task that reads this id there sees the
directory of the driver."""

REFUSED = "launch.spark.refused"
"""A file in the run directory that says why a process cannot start, however often it is tried."""

_ENDED = re.compile(r"MemberEnded: (.*)")
_ABORTED = re.compile(r"Task (\d+) in stage \S+ failed (\d+) times, most recent failure: (.*)")
_NOT_INSTALLED = re.compile(r"No module named '(?:coordinator|psrpc)")


@dataclass(frozen=True)
class MemberTask:
    """Runs a shard or a worker to its end; Spark's tasks call it. The first tasks are the shards.

    Attributes:
        launch: the id of the launch, the content of the file :data:`MARK`.
        coordinator: ``HOST:PORT`` of the coordinator.
        directory: the driver's working directory; processes run there where it exists.
    """

    plan: LaunchPlan
    launch: str
    coordinator: str
    directory: str

    def __call__(self, index: int, _: Iterable[object]) -> Iterator[str]:
        """Runs the process of task ``index``; yields nothing.

        Raises:
            MemberEnded: the process has to be started again, or this executor does not see the run
                directory.
        """
        run_dir, host = self.plan.options.run_dir, socket.gethostname()
        if _text(run_dir / MARK) != self.launch:
            raise MemberEnded(
                f"PS141: the executor on {host} does not see {run_dir}; the run directory has to "
                "lie on a file system that the driver and all executors share"
            )
        name, command = self._member(index)
        process = EchoedProcess(command, self.directory)
        status = process.run()
        why = process.reason or f"{name} on {host} ended with status {status}"
        if status == BAD_INPUT:
            (run_dir / REFUSED).write_text(why)
        elif status not in (DONE, INTERRUPTED):
            raise MemberEnded(why)
        yield from ()

    def _member(self, index: int) -> tuple[str, list[str]]:
        """Returns name and command of the process of a task."""
        plan, shards = self.plan, self.plan.options.shards
        common = ["--coordinator", self.coordinator, "--die-with-parent"]
        if index < shards:
            arguments = [*plan.shard, "--shard", str(index), *common]
            return f"shard {index}", module_command("pserver.cli", *arguments)
        return f"worker {index - shards}", module_command("worker.cli", *plan.worker, *common)


class SparkJob:
    """A Spark job with a task for each shard and worker; a thread waits for its end.

    Tasks need no barrier: the coordinator's address is known in advance, and the coordinator tells
    workers where the shards are. So Spark may restart each task by itself.
    """

    def __init__(self, context: Any, task: MemberTask) -> None:
        self._context, self._task = context, task
        self._group = f"launch-{task.launch}"
        self._error: Exception | None = None
        self._begun = time.monotonic()
        self._all_started = False

    def start(self) -> None:
        """Submits the job."""
        from pyspark import InheritableThread

        self._thread = InheritableThread(target=self._run, name="spark-job", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether Spark has given it up."""
        return self._error is not None

    def join(self, limit_s: float) -> None:
        """Waits for its end."""
        self._thread.join(limit_s)

    def cancel(self, limit_s: float) -> None:
        """Ends all tasks, and with them their processes."""
        if not self.over:
            self._context.cancelJobGroup(self._group)
            self.join(limit_s)

    def check_started(self, limit_s: float) -> None:
        """Checks that all tasks have found a slot within ``limit_s`` of the submission.

        Raises:
            LaunchFailed: some have not, because other jobs hold the slots.
        """
        if self._all_started:
            return
        running, needed = self._running(), self._task.plan.tasks - 1
        self._all_started = running == needed
        if not self._all_started and time.monotonic() - self._begun > limit_s:
            raise LaunchFailed(
                f"Spark runs {running} of {counted(needed, 'task')} after {limit_s:g} s: other "
                "jobs of this application hold the slots; end them, or ask for fewer --workers"
            )

    def failure(self) -> LaunchFailed:
        """Returns the error for a Spark job that has ended before the training."""
        if self._error is None:
            return LaunchFailed("all tasks of the Spark job have ended before the training")
        return LaunchFailed(reason_of(str(self._error)))

    def _run(self) -> None:
        plan = self._task.plan
        # Without interrupts: they would leave the processes of killed tasks behind.
        self._context.setJobGroup(self._group, f"train {plan.job.name}", interruptOnCancel=False)
        tasks = plan.tasks - 1
        try:
            self._context.parallelize(range(tasks), tasks).mapPartitionsWithIndex(
                self._task
            ).collect()
        except Exception as error:  # an error of py4j, which quotes Java
            self._error = error

    def _running(self) -> int:
        tracker = self._context.statusTracker()
        found = 0
        for job in tracker.getJobIdsForGroup(self._group):
            info = tracker.getJobInfo(job)
            stages = [tracker.getStageInfo(each) for each in info.stageIds] if info else []
            found += sum(each.numActiveTasks + each.numCompletedTasks for each in stages if each)
        return found


def reason_of(words: str) -> str:
    """Extracts the reason from Spark's message about a failed job: one line, with an error code if
    the message has one."""
    if _NOT_INSTALLED.search(words):
        return (
            "the Python of Spark's executors has no tf-pserver; install it there, or name another "
            "in PYSPARK_PYTHON"
        )
    if "cancelled" in words and not _ABORTED.search(words):
        return "the Spark job was cancelled; the same call goes on with the run"
    ended: list[str] = _ENDED.findall(words)
    aborted = _ABORTED.search(words)
    if aborted is None:
        return ended[-1] if ended else f"Spark gave the job up: {words.strip().splitlines()[0]}"
    task, times, last = aborted.groups()
    if ended and ended[-1].startswith("PS141"):
        return ended[-1]
    reason = ended[-1] if ended else last
    code = "".join(re.findall(r"^PS\d{3}: ", reason))
    reason = reason.removeprefix(code)
    return f"{code}Spark gave the job up: task {task} failed {times} times, at last with: {reason}"


def _text(path: Path) -> str:
    """Returns the content of a file; empty if there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
