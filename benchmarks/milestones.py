"""When a run reached an accuracy, told by the checkpoints that it left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from psrpc.checkpoint.load import load_variables
from psrpc.checkpoint.manifest import MANIFEST, read_manifest
from psrpc.core.names import CHECKPOINTS

Evaluate = Callable[[Path], float]
"""The test accuracy of a checkpoint's parameters."""


@dataclass(frozen=True)
class Milestone:
    """The first checkpoint that is good enough.

    Attributes:
        seconds: from the start of training until it was written.
        checkpoints: how many there were up to here.
    """

    step: int
    seconds: float
    accuracy: float
    checkpoints: int


def first_reached(
    checkpoints: Iterable[tuple[int, float, Path]],
    began: float,
    target: float,
    evaluate: Evaluate,
) -> Milestone | None:
    """The first of ``checkpoints`` (step, when it was written, where) whose accuracy is ``target``;
    None if none is. The clock is that of ``began``."""
    for count, (step, written, path) in enumerate(sorted(checkpoints), 1):
        accuracy = evaluate(path)
        if accuracy >= target:
            return Milestone(step, round(written - began, 2), round(accuracy, 4), count)
    return None


def checkpoints_of(run_dir: Path) -> list[tuple[int, float, Path]]:
    """Those that a run has left, with the initial one left out; times as ``time.monotonic`` has
    them in this process, which all processes of the host share."""
    offset = time.time() - time.monotonic()
    found = []
    for directory in (run_dir / CHECKPOINTS).glob("step-*"):
        step = read_manifest(directory).global_step
        if step:
            # The manifest is written last; a rename leaves its time alone.
            written = (directory / MANIFEST).stat().st_mtime - offset
            found.append((step, written, directory))
    return found


def evaluator(job: Path) -> Evaluate:
    """Evaluates checkpoints of ``job`` in this process."""
    replica, x, y = _loaded(job)

    def evaluate(checkpoint: Path) -> float:
        values: Mapping[str, Any] = load_variables(checkpoint)
        replica.assign(values)
        return float(replica.model.evaluate(x, y, batch_size=1000, verbose=0)[1])

    return evaluate


@lru_cache(maxsize=1)
def _loaded(job: Path) -> tuple[Any, Any, Any]:
    """The model of a job and the test data; TensorFlow is imported here."""
    from worker.runtime.quiet import import_tensorflow

    import_tensorflow()
    from worker.job.loader import load_job
    from worker.step.replica import Replica

    loaded = load_job(job, []).job
    assert loaded.eval is not None
    replica = Replica(loaded)
    replica.model.compile(loss=loaded.loss, metrics=list(loaded.metrics))
    return replica, *loaded.eval.read_range(0, loaded.eval.num_records)
