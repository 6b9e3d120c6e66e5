"""The identity of a piece of work, and sums over pieces of work. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOSS = 2
"""Numbers at the start of a row of totals that make up the mean loss. Load-bearing."""

MAX_VALUES = 1024
"""Most numbers of a row of totals; a job with more metrics has totals of its loss alone."""

KEPT_VALUES = 1 << 14
"""Most numbers that a shard keeps over all epochs: the coordinator has the older ones."""


@dataclass(frozen=True, order=True, slots=True)
class BatchId:
    """Positions ``[first, first + count)`` of the permutation of one epoch.

    The same work always has the same id, so a shard recognises a repeated push. Epochs count from
    0, in messages from 1. Ids order by epoch, then position: a round is summed in this "batch-id
    order".
    """

    epoch: int
    first: int
    count: int

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1} positions {self.first}..{self.first + self.count - 1}"


def batches_per_epoch(records: int, batch_size: int) -> int:
    """Number of batches of one epoch; the last one may be shorter."""
    return -(-records // batch_size)


def cut_batch(epoch: int, index: int, records: int, batch_size: int) -> BatchId:
    """Returns the ``index``-th batch of an epoch of ``records`` records."""
    first = index * batch_size
    if not 0 <= first < records:
        raise ValueError(f"batch {index} lies outside an epoch of {records} records")
    return BatchId(epoch, first, min(batch_size, records - first))


def add_totals(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    """Adds two rows of totals; only the loss where a resumed job has other metrics than before."""
    if len(one) != len(other):
        one, other = one[:LOSS], other[:LOSS]
    return tuple([mine + its for mine, its in zip(one, other, strict=True)])
