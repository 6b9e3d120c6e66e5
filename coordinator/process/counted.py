"""Writes the summary of a run that ends, with a count of its batches.

Every batch has to count once. A shard applies nothing that is in its applied-set, and a checkpoint
has parameters and applied-set of the same moment. So batches in the sets of all shards have counted
once on each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from coordinator.core.applied import common_positions
from coordinator.core.description import JobDescription
from coordinator.core.run import Run
from coordinator.job.job_run import JobRun
from coordinator.process.summary import still_holds, summarize, write_summary
from coordinator.schedule.open_batches import OpenBatches, count_batches
from psrpc.checkpoint.checkpoint import applied_sets, read_manifest
from psrpc.core.batch import BatchId, cut_batch
from psrpc.core.errors import CheckpointError, PsError, disk_code, disk_reason
from psrpc.core.names import SUMMARY
from psrpc.core.shard_reports import Positions
from psrpc.files.run_paths import read_summary
from psrpc.ops.logs import get_logger

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
    first of the others as ``missing``, and of those that were ``skipped`` for a gradient that was
    not finite.

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


def write_final_summary(course: JobRun) -> None:
    """Writes the summary; a full disk costs the summary, not the job's result."""
    run_dir = course.run.run_dir
    before = read_summary(run_dir)
    try:
        # Rewritten even if unchanged, so that it is newer than the start of the run.
        if still_holds(before, course):
            write_summary(run_dir, before)
            return
        counted = read_counted(course.run, course.checkpoints.newest)
        write_summary(run_dir, {**summarize(course), "counted": counted})
    except OSError as error:
        why = PsError(f"{SUMMARY} cannot be written: {disk_reason(error)}", code=disk_code(error))
        log.warning("no summary", why=why.coded)
