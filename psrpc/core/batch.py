"""The identity of a piece of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOSS = 2
"""Numbers that the mean loss is made of; they come first. Load-bearing."""

MAX_VALUES = 1024
"""Numbers of a row. What has more metrics than that has totals of its loss alone."""

KEPT_VALUES = 1 << 14
"""Numbers that a shard keeps, of all epochs together: the coordinator has the older ones."""


@dataclass(frozen=True, order=True, slots=True)
class BatchId:
    """Positions ``[first, first + count)`` of the permutation of one epoch.

    The same work has the same id whoever does it and however often, which is what lets a shard
    recognise a repeated push. Epochs count from 0, and from 1 in words. Ids order by epoch, then
    position: this is the "batch-id order" in which a round is summed.
    """

    epoch: int
    first: int
    count: int

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1} positions {self.first}..{self.first + self.count - 1}"


def batches_per_epoch(records: int, batch_size: int) -> int:
    """Batches of one epoch; the last one holds what is left over."""
    return -(-records // batch_size)


def cut_batch(epoch: int, index: int, records: int, batch_size: int) -> BatchId:
    """The ``index``-th batch of an epoch of ``records`` records."""
    first = index * batch_size
    if not 0 <= first < records:
        raise ValueError(f"batch {index} lies outside an epoch of {records} records")
    return BatchId(epoch, first, min(batch_size, records - first))


def add_totals(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    """The sum of two rows; of the loss alone where their metrics are not the same, since a job was
    resumed with others."""
    if len(one) != len(other):
        one, other = one[:LOSS], other[:LOSS]
    return tuple([mine + its for mine, its in zip(one, other, strict=True)])
