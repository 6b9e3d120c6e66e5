"""The work ledger of async training: which batches are done, leased and open.

Pure: time comes in, and nothing here locks; the engine's loop is the only caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.work import Attempt, Report, Span, Train, Wait
from psrpc.batch import BatchId, batches_per_epoch, cut_batch
from psrpc.errors import InvalidArgument
from psrpc.intervals import IntervalSet

TASK_S = 0.5
"""Work that a lease should hold: long enough to hide the round trip, short enough to lose."""

LARGEST_TASK = 256
"""Batches of one lease at most."""

RATE_MEMORY = 0.5
"""Weight of the newest measurement in a worker's rate."""


@dataclass(slots=True)
class _Pace:
    """How fast a worker goes: sizes its tasks."""

    task_size: int = 1
    batch_s: float | None = None
    since: float | None = None

    def measure(self, batches: int, now: float) -> None:
        if self.since is not None and now > self.since:
            batch_s = (now - self.since) / batches
            old = self.batch_s if self.batch_s is not None else batch_s
            self.batch_s = RATE_MEMORY * batch_s + (1 - RATE_MEMORY) * old
        self.since = now

    def next_size(self) -> int:
        if self.batch_s is not None:
            wanted = round(TASK_S / self.batch_s) if self.batch_s > 0 else LARGEST_TASK
            # At most doubling, so that one lucky measurement does not hand out a minute of work.
            self.task_size = max(1, min(wanted, 2 * self.task_size, LARGEST_TASK))
        return self.task_size


@dataclass(slots=True)
class _Holder:
    """A worker's leases: batch to attempt, in the order they were given."""

    leases: dict[BatchId, int] = field(default_factory=dict)
    pace: _Pace = field(default_factory=_Pace)


class Ledger:
    """Leases batches in position order, one epoch after another, and counts each once.

    A batch is cut from the grid of its epoch, so its id is the same on every lease. Epochs
    overlap: the next one is leased while the last batches of the present one are still out.
    Not thread-safe.
    """

    def __init__(
        self,
        *,
        records: int,
        batch_size: int,
        epochs: int,
        first_attempt: int = 1,
        done: Mapping[int, IntervalSet] | None = None,
        skipped: Mapping[int, IntervalSet] | None = None,
    ) -> None:
        """``done`` and ``skipped`` are positions per epoch, from the shards of a resumed job:
        what all of them applied, and the part of it that was skipped."""
        self._records = records
        self._batch_size = batch_size
        self._epochs = epochs
        self._per_epoch = batches_per_epoch(records, batch_size)
        self._next_attempt = first_attempt
        self._done = {epoch: IntervalSet((done or {}).get(epoch, ())) for epoch in range(epochs)}
        self._holders: dict[str, _Holder] = {}
        self._leased: dict[BatchId, str] = {}
        self._reopened: deque[BatchId] = deque()
        self._epoch, self._index = 0, 0
        examples = sum(len(positions) for positions in self._done.values())
        self._batches = sum(count_batches(done, batch_size) for done in self._done.values())
        lost = sum(len(positions) for positions in (skipped or {}).values())
        self._examples = examples - lost
        self._finished_epochs: list[int] = []

    @property
    def idle(self) -> bool:
        """Whether nobody holds a batch."""
        return not self._leased

    @property
    def finished_epochs(self) -> list[int]:
        """All epochs whose batches are done."""
        return [e for e, positions in self._done.items() if len(positions) == self._records]

    @property
    def finished(self) -> bool:
        """Whether every batch of the job is done."""
        return self._batches == self._epochs * self._per_epoch

    @property
    def span(self) -> Span:
        """Where training stands; the epoch is the oldest that is not done."""
        epoch = next(
            (e for e in range(self._epochs) if len(self._done[e]) < self._records),
            self._epochs - 1,
        )
        total = self._epochs * self._per_epoch
        return Span(self._batches, total, epoch, self._batches, self._examples)

    def lease(self, worker: str, now: float, received: int, workers: int) -> Train | Wait:
        """A task for ``worker``: what was leased to it but did not reach it (attempts above
        ``received``), or else the next open batches. ``workers`` share what is left, so tasks
        shrink towards the end."""
        holder = self._holders.setdefault(worker, _Holder())
        if not holder.leases:
            holder.pace.since = now  # what came before was no work
        lost = [Attempt(batch, n) for batch, n in holder.leases.items() if n > received]
        if lost:
            return Train(tuple(lost))
        left = self._epochs * self._per_epoch - self._batches - len(self._leased)
        size = min(holder.pace.next_size(), max(1, left // (2 * max(1, workers))))
        batches: list[Attempt] = []
        while len(batches) < size and (batch := self._next_open()) is not None:
            attempt = Attempt(batch, self._next_attempt)
            self._next_attempt += 1
            holder.leases[batch] = attempt.number
            self._leased[batch] = worker
            batches.append(attempt)
        if not batches:
            return Wait(self.waiting_for())
        return Train(tuple(batches))

    def report(self, worker: str, reports: Sequence[Report], now: float) -> list[Report]:
        """Records batches that are done (or skipped) on all shards; returns those that count now.

        Idempotent by batch id, whoever reports: a batch that was leased twice counts once.

        Raises:
            InvalidArgument: not a batch of this job; nothing was recorded.
        """
        for report in reports:
            self._check(report.batch)
        counted = []
        for report in reports:
            batch = report.batch
            holder = self._leased.pop(batch, None)
            if holder is not None:
                del self._holders[holder].leases[batch]
            positions = self._done[batch.epoch]
            if positions.contains(batch.first, batch.first + batch.count):
                continue
            if holder is None and batch in self._reopened:
                self._reopened.remove(batch)
            positions.add(batch.first, batch.first + batch.count)
            self._batches += 1
            self._examples += 0 if report.skipped else batch.count
            if len(positions) == self._records:
                self._finished_epochs.append(batch.epoch)
            counted.append(report)
        if counted and worker in self._holders:
            self._holders[worker].pace.measure(len(counted), now)
        return counted

    def revoke(self, worker: str) -> list[Attempt]:
        """What ``worker`` holds, which nobody else gets before :meth:`release`."""
        holder = self._holders.get(worker)
        if holder is None:
            return []
        return [Attempt(batch, number) for batch, number in holder.leases.items()]

    def release(self, worker: str) -> int:
        """No shard takes anything from ``worker`` any more: opens what it holds to everyone,
        before anything new. How many batches that are."""
        holder = self._holders.pop(worker, None)
        if holder is None:
            return 0
        batches = sorted(holder.leases)
        for batch in batches:
            del self._leased[batch]
        self._reopened.extendleft(reversed(batches))
        return len(batches)

    def take_finished_epochs(self) -> list[int]:
        """Epochs whose batches have all been done since the last call, in rising order."""
        epochs, self._finished_epochs = sorted(self._finished_epochs), []
        return epochs

    def waiting_for(self) -> str:
        """What the next step waits for, in words; empty when there are open batches."""
        if self.finished or self._has_open():
            return ""
        held = [f"{len(h.leases)} by {name}" for name, h in self._holders.items() if h.leases]
        return f"all batches are leased; awaited are {', '.join(sorted(held))}"

    def _has_open(self) -> bool:
        return bool(self._reopened) or self._epoch < self._epochs

    def _next_open(self) -> BatchId | None:
        if self._reopened:
            return self._reopened.popleft()
        while self._epoch < self._epochs:
            batch = cut_batch(self._epoch, self._index, self._records, self._batch_size)
            self._index += 1
            if self._index == self._per_epoch:
                self._epoch, self._index = self._epoch + 1, 0
            if not self._done[batch.epoch].contains(batch.first, batch.first + batch.count):
                return batch
        return None

    def _check(self, batch: BatchId) -> None:
        if (
            0 <= batch.epoch < self._epochs
            and batch.first % self._batch_size == 0
            and 0 <= batch.first < self._records
        ):
            index = batch.first // self._batch_size
            if batch == cut_batch(batch.epoch, index, self._records, self._batch_size):
                return
        raise InvalidArgument(
            f"{batch} is not a batch of this job: {self._epochs} epochs of {self._records} "
            f"records in batches of {self._batch_size}"
        )


def count_batches(positions: IntervalSet, batch_size: int) -> int:
    """How many batches these positions of an epoch are, all of them whole."""
    return sum(-(-stop // batch_size) - start // batch_size for start, stop in positions)
