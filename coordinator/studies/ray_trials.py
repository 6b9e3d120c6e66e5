"""Trials on Ray: each is one task, whose node runs the whole cluster of the trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.launchers.ray import alive_nodes, connected, resource_options
from coordinator.launchers.ray_plan import Bundle, check_places, read_bundle
from coordinator.launchers.task_process import MemberEnded
from coordinator.studies.engine_trials import TaskEnd, TrialTask
from coordinator.tune.options import TuneArguments
from psrpc.core.errors import InvalidArgument
from psrpc.ops.extras import check_ray


class RayTrialTask:
    """An `EngineTask` as a task of Ray."""

    def __init__(self, bundle: Bundle, task: TrialTask) -> None:
        self._bundle, self._task = bundle, task
        self._reference: Any = None

    def start(self) -> None:
        """See :class:`EngineTask`."""
        import ray

        # The study itself starts lost tasks again, and knows whether they get on.
        options = {**resource_options(self._bundle), "max_retries": 0}
        name = f"trial {self._task.start.number}"
        self._reference = ray.remote(run_trial).options(**options, name=name).remote(self._task)

    def withdraw(self) -> None:
        """See :class:`EngineTask`: Ray does not tell whether a task has begun."""

    def cancel(self) -> None:
        """See :class:`EngineTask`."""
        import ray

        ray.cancel(self._reference, force=True)

    def look(self) -> TaskEnd | None:
        """See :class:`EngineTask`."""
        import ray
        from ray.exceptions import RayError, RayTaskError, TaskCancelledError

        ready, _ = ray.wait([self._reference], timeout=0)
        if not ready:
            return None
        try:
            ray.get(self._reference)
        except TaskCancelledError:
            return TaskEnd("its task was cancelled", "cancelled")
        except RayTaskError as error:
            how = str(error.cause)
            ours = isinstance(error.cause, MemberEnded) and not how.startswith("PS141")
            return TaskEnd(how, "lost" if ours else "given up")
        except RayError as error:
            why = str(error).strip().partition("\n")[0].rstrip(".")
            return TaskEnd(f"its task was lost: {type(error).__name__}: {why}")
        return TaskEnd()


def run_trial(task: TrialTask) -> None:
    """Runs in a worker process of Ray. Raises as :meth:`TrialTask.run` does."""
    task.run()


@dataclass(frozen=True)
class RayEngine:
    """A `TrialEngine`.

    Attributes:
        bundle: the resources of one trial.
    """

    bundle: Bundle

    @property
    def cores(self) -> int:
        """See :class:`TrialEngine`."""
        return max(1, int(self.bundle.get("CPU", 1)))

    def left(self, _run_dir: Path) -> str:
        """See :class:`TrialEngine`: Ray ends the tasks of a driver that is gone."""
        return ""

    def task(self, task: TrialTask, _note: Callable[[str], object]) -> RayTrialTask:
        """See :class:`TrialEngine`."""
        return RayTrialTask(self.bundle, task)


@contextmanager
def ray_engine(options: TuneArguments) -> Iterator[RayEngine]:
    """Connects to Ray for the time of a study; yields the engine.

    Raises:
        InvalidArgument: an option cannot be used.
        InvalidJob: Ray is not installed, or too old.
        LaunchFailed: Ray does not answer, or has no room for ``--parallel`` trials.
    """
    check_ray("`coordinator tune --on ray`")
    bundle = read_bundle(options.resources)
    if not all(amount > 0 for amount in bundle.values()) or not bundle:
        raise InvalidArgument(
            f"--resources is {options.resources!r}; expected those of one trial as NAME:N, as "
            "CPU:4,GPU:1"
        )
    with connected(options.address):
        bundles = {f"trial {number}": bundle for number in range(options.parallel)}
        fix = "ask for fewer --parallel or less --resources, or add nodes"
        check_places(bundles, "PACK", alive_nodes(), "--parallel {} trials need", fix)
        yield RayEngine(bundle)
