"""``summary.json``: the result of a run."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.core.lifecycle import STOPPED
from coordinator.core.run import Followed
from coordinator.membership.members import Worker
from coordinator.membership.progress import WorkerProgress
from coordinator.training.gauges import counts, counts_by_worker, refused, staleness_counts
from psrpc.core.names import CHECKPOINTS, SUMMARY
from psrpc.files.storage import replace_text

if TYPE_CHECKING:
    # `coordinator up` writes summaries too, but reports mistakes before it imports a job's modules.
    from coordinator.job.job_run import JobRun

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from coordinator.core.applied import common_positions
from coordinator.core.description import JobDescription
from coordinator.core.run import Run
from coordinator.job.job_run import JobRun
from coordinator.schedule.open_batches import OpenBatches, count_batches
from psrpc.checkpoint.checkpoint import applied_sets, read_manifest
from psrpc.core.batch import BatchId, cut_batch
from psrpc.core.errors import CheckpointError, PsError, disk_code, disk_reason
from psrpc.core.shard_reports import Positions
from psrpc.files.run_paths import read_summary
from psrpc.ops.logs import get_logger


def summarize(job_run: JobRun) -> dict[str, Any]:
    """Returns the figures of a run that has ended. Rates are means over this run's training time:
    ``steps_per_s`` of global steps, ``batches_per_s`` of micro-batches. ``epoch`` counts from 1,
    and ``loss`` is the mean of the last steps, as in a status; ``eval`` is the newest evaluation,
    at ``eval_step``, empty if there is none. Histograms (entry s counts the applied pushes of
    staleness s) and times (seconds) are those of the last processes."""
    run, training = job_run.run, job_run.training
    progress, span = training.progress, training.span
    results = training.notes.results
    train_s, pushed = progress.train_s, counts_by_worker(job_run)
    return {
        "run_id": run.run_id,
        "job": run.description.name,
        "phase": job_run.phase,
        "reason": job_run.reason,
        "mode": run.settings.mode,
        "policy": _of_policy(run.followed[-1]),
        "policies": [_of_policy(followed) for followed in run.followed],
        "tables": len(run.plan.tables),
        "growing_tables": [t.name for t in run.plan.tables if t.vocabulary is None],
        "shards": run.plan.shards - len(run.hosted),
        **({"slices": len(run.hosted)} if run.hosted else {}),
        "workers": progress.contributors,
        "replicas": run.settings.open,
        "global_step": span.step,
        "total_steps": span.total_steps,
        "epoch": job_run.epoch,
        "epochs": run.description.epochs,
        "loss": _finite(training.watch.loss),
        "batches": span.batches,
        "examples": span.examples,
        "wall_s": round(job_run.now() - job_run.began, 3),
        "train_s": round(train_s, 3),
        "steps_per_s": round(progress.steps_done / train_s, 3) if train_s else 0.0,
        "batches_per_s": round(progress.batches / train_s, 3) if train_s else 0.0,
        "examples_per_s": round(progress.examples / train_s, 3) if train_s else 0.0,
        "eval": _plain(results[-1][2]) if results else {},
        "eval_step": results[-1][1] if results else None,
        "evaluations": [
            {"evaluation": name, "global_step": step, **_plain(values)}
            for name, step, values in results
        ],
        "history": [_plain(row.flat()) for row in training.epochs.history.rows],
        "checkpoint": job_run.checkpoints.newest,
        "best": _best(job_run),
        "refused": refused(job_run),
        "skipped": progress.skipped,
        "failed": progress.failed,
        "mean_staleness": round(progress.mean_staleness, 4),
        "staleness_counts": staleness_counts(job_run),
        "version_skew_max": progress.version_skew,
        **counts(job_run),
        "by_shard": [
            {
                "shard": shard.index,
                "staleness_counts": shard.figures.staleness_counts,
                "too_stale": shard.figures.too_stale,
                "uncompensated": shard.figures.uncompensated,
                "apply_s": round(shard.figures.apply_s, 3),
            }
            for shard in job_run.members.places.shards
        ],
        "by_worker": {
            name: _of_worker(job_run, worker, pushed.get(name, ()))
            for name, worker in job_run.members.workers.items()
        },
        "generation": run.generation,
        "resume": _resume(job_run),
        "warnings": job_run.warnings.kept,
    }


def _of_policy(followed: Followed) -> dict[str, Any]:
    return {
        "policy": followed.number,
        "settings": followed.settings.to_json(),
        "words": followed.words,
        "global_step": followed.step,
    }


def _best(job_run: JobRun) -> dict[str, Any] | None:
    """Returns the epoch whose state the run ends with, if the job restores its best when done;
    otherwise the best epoch with a kept checkpoint, which an export does not select. ``by`` names
    the metric."""
    training, description = job_run.training, job_run.run.description
    best = training.epochs.best if job_run.phase == "done" else None
    restored = best is not None
    objective = description.stop_early.objective if restored and description.stop_early else None
    if not restored:
        best, objective = training.epochs.kept, description.keep_best
    if best is None or objective is None:
        return None
    return {
        **_plain(best.evaluation),
        "epoch": best.epoch + 1,
        "checkpoint": f"{CHECKPOINTS}/{best.checkpoint}",
        "global_step": best.eval_step,
        "by": objective.metric,
        "restored": restored,
    }


def _of_worker(job_run: JobRun, worker: Worker, pushed: tuple[int, ...]) -> dict[str, Any]:
    progress = job_run.training.progress.workers.get(worker.name, WorkerProgress())
    return {
        "batches": progress.batches,
        "examples": progress.examples,
        "examples_per_s": round(progress.mean_examples_per_s, 3),
        "staleness_counts": pushed,
        "times_s": {cause: round(s, 3) for cause, s in worker.times.by_cause().items()},
    }


def still_holds(before: Mapping[str, Any], job_run: JobRun) -> bool:
    """Whether the summary ``before`` still describes the run: the run was done then, and has
    trained nothing since."""
    ended_well = job_run.phase == "done" or job_run.reason == STOPPED
    # An earlier coordinator may have trained and died before it wrote a summary.
    trained = job_run.training.progress.batches or job_run.checkpoints.newest != before.get(
        "checkpoint"
    )
    return before.get("phase") == "done" and ended_well and not trained


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Writes the file atomically. Raises OSError."""
    replace_text(run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")


def _resume(job_run: JobRun) -> str:
    """Returns the options that resume a failed or stopped run; empty if it cannot be resumed."""
    if job_run.phase != "failed" or not job_run.checkpoints.newest:
        return ""
    return shlex.join(["--resume", "--run-dir", str(job_run.run.run_dir)])


def _plain(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {k: _finite(v) for k, v in values.items()}


def _finite(value: float | None) -> float | None:
    """Returns None for values that are not finite: JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


log = get_logger()

NAMED = 10
"""Most batches of a kind that are named; all are counted."""


def read_counted(run: Run, checkpoint: str) -> dict[str, Any] | None:
    """Returns :func:`count` of a checkpoint, named relative to the run directory; None if it is
    unreadable."""
    directory = run.run_dir / checkpoint
    try:
        manifest = read_manifest(directory)
        applied = applied_sets(directory, manifest)
        skipped = applied_sets(directory, manifest, kind="skipped")
    except (CheckpointError, OSError):
        return None
    return count(run.description, applied, skipped, run.counted_twice)


def count(
    job: JobDescription, applied: Sequence[Positions], skipped: Sequence[Positions], twice: int = 0
) -> dict[str, Any]:
    """Counts, for the summary, the job's batches and those ``counted`` on every shard; names the
    first missing ones, and the first that were ``skipped`` because their gradient was not finite.

    Args:
        applied, skipped: the applied-set of each shard, and the skipped part of it.
        twice: batches that may have counted twice on parts of the parameters.
    """
    todo = OpenBatches(
        records=job.train_records,
        batch_size=job.unit,
        epochs=job.epochs,
        done=common_positions(applied),
    )
    lost = common_positions(skipped)
    return {
        "batches": todo.total,
        "counted": todo.batches,
        "skipped": sum(count_batches(positions, job.unit) for positions in lost.values()),
        "twice": twice,
        "missing_batches": _named(iter(todo.take, None)),
        "skipped_batches": _named(_batches(job, lost)),
    }


def _named(batches: Iterable[BatchId]) -> list[str]:
    return [str(batch) for batch in islice(batches, NAMED)]


def _batches(job: JobDescription, positions: Positions) -> Iterator[BatchId]:
    for epoch in sorted(positions):
        for start, stop in positions[epoch]:
            for index in range(start // job.unit, -(-stop // job.unit)):
                yield cut_batch(epoch, index, job.train_records, job.unit)


def write_final_summary(job_run: JobRun) -> None:
    """Writes the summary; a full disk costs the summary, not the job's result."""
    run_dir = job_run.run.run_dir
    before = read_summary(run_dir)
    try:
        # Rewritten even if unchanged, so that it is newer than the start of the run.
        if still_holds(before, job_run):
            write_summary(run_dir, before)
            return
        counted = read_counted(job_run.run, job_run.checkpoints.newest)
        write_summary(run_dir, {**summarize(job_run), "counted": counted})
    except OSError as error:
        why = PsError(f"{SUMMARY} cannot be written: {disk_reason(error)}", code=disk_code(error))
        log.warning("no summary", why=why.coded)
