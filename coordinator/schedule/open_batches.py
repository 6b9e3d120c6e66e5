"""The batches of a job: which are done, and which comes next."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from psrpc.core.batch import BatchId, batches_per_epoch, cut_batch
from psrpc.core.errors import InvalidArgument
from psrpc.core.intervals import IntervalSet

NOTHING_NEW = "the policy to change; nothing new is handed out under the present one"
NOTHING_BELOW = "the hold to end; all batches below its limit are done"


class OpenBatches:
    """The grid of batches of all epochs, without the finished ones.

    Stores nothing per batch: finished ones are intervals, and the next one is computed on demand.
    Each new batch is taken once; those of ``partial`` are taken separately. Not thread-safe.
    """

    def __init__(
        self,
        *,
        records: int,
        batch_size: int,
        epochs: int,
        done: Mapping[int, IntervalSet],
        partial: Mapping[int, IntervalSet] | None = None,
        until_epoch: int | None = None,
        limit: int | None = None,
    ) -> None:
        """``done`` are the positions per epoch that all shards have, ``partial`` those that only
        some have. New batches come from epochs before ``until_epoch``, and begin while fewer than
        ``limit`` are done or under way."""
        self._records = records
        self._batch_size = batch_size
        self._epochs = epochs
        self._until = epochs if until_epoch is None else min(until_epoch, epochs)
        self.per_epoch = batches_per_epoch(records, batch_size)
        """Batches of one epoch."""
        # Intervals of batch indices within the epoch, as everything below.
        self._done = {
            epoch: self._indices(done[epoch], whole=True) for epoch in done if epoch < epochs
        }
        self._left = [
            self.per_epoch - len(self._done.get(epoch, ())) for epoch in range(self._epochs)
        ]
        self._batches = epochs * self.per_epoch - sum(self._left)
        self._oldest = 0
        touched = {
            epoch: self._indices(positions, whole=False)
            for epoch, positions in (partial or {}).items()
            if epoch < epochs
        }
        self._touched = touched
        self._partial = deque((e, *interval) for e in sorted(touched) for interval in touched[e])
        self._epoch, self._index = 0, 0
        self._begun = self._batches + sum(len(indices) for indices in touched.values())
        """Number of batches that are done, taken by a worker, or applied by only some shards."""
        self._limit = limit

    def extend(self, until_epoch: int) -> None:
        """Allows new batches of epochs before ``until_epoch``."""
        self._until = min(until_epoch, self._epochs)

    def allow(self, limit: int) -> None:
        """Allows new batches to begin while fewer than ``limit`` are done or under way."""
        self._limit = limit

    @property
    def end(self) -> int:
        """The number of batches of the job that may begin, finished ones included."""
        return self.total if self._limit is None else min(self._limit, self.total)

    @property
    def room(self) -> int:
        """Number of new batches that may begin, by the limit."""
        return max(0, self.end - self._begun)

    @property
    def limited(self) -> bool:
        """Whether the limit allows no new batch."""
        return self._limit is not None and self._begun >= self._limit

    @property
    def batches(self) -> int:
        """Number of finished batches."""
        return self._batches

    @property
    def total(self) -> int:
        """Number of batches of the job."""
        return self._epochs * self.per_epoch

    @property
    def finished(self) -> bool:
        """Whether all are done."""
        return self._batches == self.total

    @property
    def exhausted(self) -> bool:
        """Whether all batches before ``until_epoch`` are done."""
        return self.finished or self.epoch >= self._until

    @property
    def finished_epochs(self) -> list[int]:
        """Epochs whose batches are all done."""
        return [epoch for epoch, left in enumerate(self._left) if not left]

    @property
    def epoch(self) -> int:
        """The oldest epoch that is not done; the last one when all are."""
        while self._oldest < self._epochs - 1 and not self._left[self._oldest]:
            self._oldest += 1
        return self._oldest

    @property
    def next_epoch(self) -> int | None:
        """The epoch of the next new batch; None if there is none."""
        return self._epoch if self._seek() else None

    @property
    def has_partial(self) -> bool:
        """Whether a batch that only some shards have waits to be taken."""
        return self._seek_partial()

    def left(self, epoch: int) -> int:
        """Returns the number of unfinished batches of ``epoch``."""
        return self._left[epoch]

    def take(self) -> BatchId | None:
        """Takes the next new batch: epoch after epoch, in position order. Does not check the limit,
        which a round may exceed: the caller asks whether the batches are ``limited``."""
        if not self._seek():
            return None
        batch = self._cut(self._epoch, self._index)
        self._index += 1
        self._begun += 1
        return batch

    def take_partial(self) -> BatchId | None:
        """Takes the next batch that only some shards have, in the order of :meth:`take`; None if
        none is left."""
        if not self._seek_partial():
            return None
        epoch, start, stop = self._partial[0]
        self._partial[0] = (epoch, start + 1, stop)
        return self._cut(epoch, start)

    def is_done(self, batch: BatchId) -> bool:
        """Whether this batch of the grid is done."""
        index = batch.first // self._batch_size
        done = self._done.get(batch.epoch)
        return done is not None and done.contains(index, index + 1)

    def finish(self, batch: BatchId) -> bool:
        """Marks an unfinished batch of the grid as done; returns whether its epoch is."""
        assert not self.is_done(batch)
        index = batch.first // self._batch_size
        self._done.setdefault(batch.epoch, IntervalSet()).add(index, index + 1)
        self._batches += 1
        self._left[batch.epoch] -= 1
        return not self._left[batch.epoch]

    def check(self, batch: BatchId) -> None:
        """Raises InvalidArgument for a batch outside the grid."""
        if (
            0 <= batch.epoch < self._epochs
            and batch.first % self._batch_size == 0
            and 0 <= batch.first < self._records
            and batch == self._cut(batch.epoch, batch.first // self._batch_size)
        ):
            return
        raise InvalidArgument(
            f"{batch} is not a batch of this job: {self._epochs} epochs of {self._records} "
            f"records in batches of {self._batch_size}"
        )

    def _seek(self) -> bool:
        """Advances past batches that are done or partial; returns whether a new batch is left."""
        while self._epoch < self._until:
            done, touched = self._done.get(self._epoch), self._touched.get(self._epoch)
            index = None
            while index != self._index:
                index = self._index
                for taken in (done, touched):
                    self._index = taken.end_of(self._index) if taken is not None else self._index
            if self._index < self.per_epoch:
                return True
            self._epoch, self._index = self._epoch + 1, 0
        return False

    def _seek_partial(self) -> bool:
        while self._partial:
            epoch, start, stop = self._partial[0]
            done = self._done.get(epoch)
            start = done.end_of(start) if done is not None else start
            if start < stop:
                self._partial[0] = (epoch, start, stop)
                return True
            self._partial.popleft()
        return False

    def _cut(self, epoch: int, index: int) -> BatchId:
        return cut_batch(epoch, index, self._records, self._batch_size)

    def _indices(self, positions: IntervalSet, *, whole: bool) -> IntervalSet:
        """Returns the batches that lie wholly in ``positions``, or else those that they touch."""
        indices = IntervalSet()
        for start, stop in positions:
            if whole:
                first = -(-start // self._batch_size)
                last = self.per_epoch if stop >= self._records else stop // self._batch_size
            else:
                first = start // self._batch_size
                last = min(-(-stop // self._batch_size), self.per_epoch)
            if first < last:
                indices.add(first, last)
        return indices


class BatchSchedule:
    """The part of a schedule that depends on nothing but its batches. Not thread-safe."""

    def __init__(self, todo: OpenBatches) -> None:
        self._todo = todo

    @property
    def finished_epochs(self) -> list[int]:
        """All epochs whose batches are done."""
        return self._todo.finished_epochs

    @property
    def finished(self) -> bool:
        """Whether every batch of the job is done."""
        return self._todo.finished

    @property
    def exhausted(self) -> bool:
        """Whether every batch before ``until_epoch`` is done."""
        return self._todo.exhausted

    def extend(self, until_epoch: int) -> None:
        """Allows new batches of epochs before ``until_epoch``."""
        self._todo.extend(until_epoch)
        self._allowed()

    def allow(self, limit: int) -> None:
        """Allows new batches to begin while fewer than ``limit`` are done or under way."""
        self._todo.allow(limit)
        self._allowed()

    def _allowed(self) -> None:
        """Reacts to new batches that may begin now. A subclass overrides this."""


def count_batches(positions: IntervalSet, batch_size: int) -> int:
    """Counts the batches in these positions of an epoch, all of them whole."""
    return sum(-(-stop // batch_size) - start // batch_size for start, stop in positions)
