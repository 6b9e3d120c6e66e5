"""Whether every batch has counted once: what the shards say in a checkpoint, beside the job.

A shard applies nothing that is in its applied-set already, and a checkpoint has parameters and
applied-set of one moment. So what is in the sets of all shards has counted once on each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from coordinator.core.applied import common_positions
from coordinator.core.description import JobDescription
from coordinator.core.run import Run
from coordinator.core.work import Positions
from coordinator.schedule.open_batches import OpenBatches, count_batches
from psrpc.checkpoint.checkpoint import applied_sets, read_manifest
from psrpc.core.batch import BatchId, cut_batch
from psrpc.core.errors import CheckpointError

NAMED = 10
"""Batches of a kind that are named, at most; all are counted."""


def read_counted(run: Run, checkpoint: str) -> dict[str, Any] | None:
    """What :func:`count` says of a checkpoint, named relative to the run directory; None where it
    cannot be read."""
    directory = run.run_dir / checkpoint
    try:
        manifest = read_manifest(directory)
        applied = applied_sets(directory, manifest)
        skipped = applied_sets(directory, manifest, kind="skipped")
    except (CheckpointError, OSError):
        return None
    return count(run.description, applied, skipped, run.counted_twice)


def count(
    job: JobDescription,
    applied: Sequence[Positions],
    skipped: Sequence[Positions],
    twice: int = 0,
) -> dict[str, Any]:
    """For the summary: how many batches the job has, and how many ``counted`` on every shard.
    ``missing`` are the others, and ``skipped`` those that counted without a gradient, which was
    not finite: the first of each by name.

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
