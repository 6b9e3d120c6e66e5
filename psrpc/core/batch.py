"""The ids of batches, and the totals that batches add to their epoch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOSS = 2
"""Number of values at the start of a row of totals that yield the mean loss. Load-bearing."""

MAX_VALUES = 1024
"""Maximum length of a row of totals. A job with more metrics has totals of its loss only."""

KEPT_VALUES = 1 << 14
"""Maximum number of values in the totals that a shard keeps, over all epochs. It drops the oldest,
which the coordinator has already."""


@dataclass(frozen=True, order=True, slots=True)
class BatchId:
    """Positions ``[first, first + count)`` of the permutation of one epoch.

    The same work always has the same id, so a shard recognizes a repeated push. Epochs are numbered
    from 0, in messages for users from 1. Ids are ordered by epoch, then by position; a round is
    summed in this "batch-id order".
    """

    epoch: int
    first: int
    count: int

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1} positions {self.first}..{self.first + self.count - 1}"


def batches_per_epoch(records: int, batch_size: int) -> int:
    """Returns the number of batches in one epoch; the last one may be shorter."""
    return -(-records // batch_size)


def cut_batch(epoch: int, index: int, records: int, batch_size: int) -> BatchId:
    """Returns the ``index``-th batch of an epoch of ``records`` records."""
    first = index * batch_size
    if not 0 <= first < records:
        raise ValueError(f"batch {index} lies outside an epoch of {records} records")
    return BatchId(epoch, first, min(batch_size, records - first))


def add_totals(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    """Adds two rows of totals. If they differ in length, because a resumed job has other metrics
    than before, adds only the loss."""
    if len(one) != len(other):
        one, other = one[:LOSS], other[:LOSS]
    return tuple([mine + its for mine, its in zip(one, other, strict=True)])
