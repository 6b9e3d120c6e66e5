"""Trials on Slurm: each is a batch job of one task, which runs the whole cluster of the trial."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template

from coordinator.launchers.slurm import (
    BatchOptions,
    batch_options,
    check_partition,
    run_slurm,
    submit,
)
from coordinator.studies.engine_trials import TaskEnd, TrialTask, unseen
from coordinator.studies.trial_process import read_wish, trial_answer
from coordinator.tune.options import TuneArguments
from psrpc.core.errors import LaunchFailed
from psrpc.core.text import counted
from psrpc.files.storage import replace_text

SCRIPT = "trial.sbatch"
BATCH_JOB = "trial.job"
"""A file of the run directory with the newest batch job of the trial and its launch id, by which
another command finds the job of one that was killed."""

POLL_S = 2.0
"""How often a study asks Slurm for the states of its batch jobs, at most."""

_TEMPLATE = Template("""\
#!/bin/bash
#SBATCH --job-name=$name
#SBATCH --ntasks=1
#SBATCH --output=$log
#SBATCH --no-requeue
#SBATCH --signal=B:TERM@120
$directives
[ -d $directory ] && cd $directory
exec $command
""")

_OVER = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
    # Slurm forgets jobs some minutes after their end.
    "",
}
"""States of a batch job that has ended."""


class SlurmQueue:
    """The states of this user's batch jobs, asked for once for all trials. Not thread-safe."""

    def __init__(self) -> None:
        self._states: dict[int, str] = {}
        self._due = 0.0
        self._silent = False

    def ask(self) -> None:
        """Asks Slurm for all states. Raises LaunchFailed."""
        lines = run_slurm("squeue", "--me", "-h", "-t", "all", "-o", "%A %T").splitlines()
        self._states = {int(job): state for job, state in map(str.split, lines)}

    def state(self, job: int, note: Callable[[str], object]) -> str:
        """Returns the state of a batch job, such as ``RUNNING``; empty if Slurm has forgotten it.
        While Slurm does not answer, the last state counts, and ``note`` gets a line."""
        if time.monotonic() >= self._due:
            try:
                self.ask()
                self._silent = False
            except LaunchFailed as error:
                if not self._silent:
                    note(f"warning: the states of batch jobs are unknown: {error}")
                self._silent = True
            self._due = time.monotonic() + POLL_S
        return self._states.get(job, "")

    def submitted(self, job: int) -> None:
        """Adds a batch job."""
        self._states[job] = "PENDING"

    def holds(self, job: int) -> bool:
        """Whether a batch job waits or runs, as of the last answer."""
        return self._states.get(job, "") not in _OVER


class SlurmTask:
    """An `EngineTask` as a batch job. It outlives a command that is killed, and the next command
    takes it over."""

    def __init__(
        self,
        queue: SlurmQueue,
        batch: BatchOptions,
        task: TrialTask,
        note: Callable[[str], object],
    ) -> None:
        self._queue, self._batch, self._task, self._note = queue, batch, task, note
        self._run_dir = task.start.run_dir
        self._job = 0

    def start(self) -> None:
        """See :class:`EngineTask`; takes over a batch job that is there already."""
        launch = self._task.start.launch
        job, of = read_job(self._run_dir)
        if not self._job and of == launch:
            self._job = job
            return
        path = self._run_dir / SCRIPT
        path.write_text(self._script())
        self._job = submit(path)
        replace_text(
            self._run_dir / BATCH_JOB, json.dumps({"job": self._job, "launch": launch}) + "\n"
        )
        self._queue.submitted(self._job)

    def withdraw(self) -> None:
        """See :class:`EngineTask`."""
        with suppress(LaunchFailed):
            run_slurm("scancel", "--quiet", "--state=PENDING", str(self._job))

    def cancel(self) -> None:
        """See :class:`EngineTask`."""
        with suppress(LaunchFailed):
            run_slurm("scancel", "--quiet", "--signal=KILL", "--full", str(self._job))

    def look(self) -> TaskEnd | None:
        """See :class:`EngineTask`; does not wait for Slurm if the trial has answered."""
        start = self._task.start
        if trial_answer(self._run_dir, start.launch):
            return TaskEnd()
        state = self._queue.state(self._job, self._note)
        if state not in _OVER:
            return None
        log = self._log(str(self._job))
        if state == "CANCELLED":
            return TaskEnd(f"batch job {self._job} was cancelled", "cancelled")
        if state in ("COMPLETED", "FAILED") and not log.exists():
            return TaskEnd(unseen("the node of its batch job", self._run_dir.parent), "given up")
        ended = f"has ended as {state}" if state else "is gone"
        return TaskEnd(f"batch job {self._job} {ended}, see {log}")

    def _log(self, job: str) -> Path:
        return self._run_dir / f"slurm-{job}.log"

    def _script(self) -> str:
        return _TEMPLATE.substitute(
            name=shlex.quote(f"{self._run_dir.parent.name}-{self._run_dir.name}"),
            log=shlex.quote(str(self._log("%j"))),
            directives=self._batch.directives,
            directory=shlex.quote(self._task.directory),
            command=shlex.join(self._task.start.command(self._task.arguments)),
        )


def read_job(run_dir: Path) -> tuple[int, str]:
    """Returns the newest batch job of a trial and its launch id; 0 and nothing without one."""
    try:
        found = json.loads((run_dir / BATCH_JOB).read_text())
        return int(found["job"]), str(found["launch"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, ""


@dataclass(frozen=True)
class SlurmEngine:
    """A `TrialEngine`."""

    batch: BatchOptions
    queue: SlurmQueue

    @property
    def cores(self) -> int:
        """See :class:`TrialEngine`."""
        return self.batch.cores

    def left(self, run_dir: Path) -> str:
        """See :class:`TrialEngine`: a batch job that waits, runs, or has answered meanwhile. Raises
        LaunchFailed."""
        job, launch = read_job(run_dir)
        if not launch or read_wish(run_dir, launch):
            return ""
        self.queue.ask()
        return launch if trial_answer(run_dir, launch) or self.queue.holds(job) else ""

    def task(self, task: TrialTask, note: Callable[[str], object]) -> SlurmTask:
        """See :class:`TrialEngine`."""
        return SlurmTask(self.queue, self.batch, task, note)


@contextmanager
def slurm_engine(options: TuneArguments) -> Iterator[SlurmEngine]:
    """Checks the options of ``sbatch``; yields the engine.

    Raises:
        InvalidArgument: an option cannot be used.
        LaunchFailed: there is no Slurm here, or no room for ``--parallel`` trials.
    """
    given: Mapping[str, object] = {
        "partition": options.partition,
        "time": options.time,
        "cpus-per-task": options.cpus_per_task,
    }
    batch = batch_options(given, options.sbatch)
    asked = f"the study has --parallel {counted(options.parallel, 'trial')}"
    check_partition(options.parallel, asked, batch, "--parallel or --cpus-per-task")
    yield SlurmEngine(batch, SlurmQueue())
