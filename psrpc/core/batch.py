"""The identity of a piece of work."""

from __future__ import annotations

from dataclasses import dataclass


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
