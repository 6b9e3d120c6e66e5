"""The set of batches that a shard has applied. With it the shard recognizes repeated pushes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from psrpc.core.batch import KEPT_VALUES, LOSS, MAX_VALUES, BatchId, add_totals
from psrpc.core.errors import InvalidArgument
from psrpc.core.intervals import IntervalSet
from psrpc.core.shard_reports import AppliedEpoch, EpochTotals

NEWEST = 4
"""Number of newest epochs whose totals a heartbeat reports."""


class AppliedSet:
    """The positions of each epoch that a shard has applied or recorded as skipped. Not thread-safe.

    Stores intervals, so its size depends on the number of gaps, not of batches: a complete epoch is
    one interval.
    """

    def __init__(self) -> None:
        self._applied: dict[int, IntervalSet] = {}
        self._skipped: dict[int, IntervalSet] = {}
        self._totals: dict[int, tuple[float, ...]] = {}
        """Totals of the newest epochs, see :mod:`psrpc.core.batch`."""
        self._published: dict[int, EpochTotals] = {}
        """Copies of ``_totals`` with their record counts, for other threads to read; a change
        replaces the whole value."""

    def contains(self, batch: BatchId) -> bool:
        """Whether ``batch`` was applied or skipped before.

        Raises:
            InvalidArgument: only a part of it was. Batches never change after they are cut, so the
                pusher has cut them differently from this shard, and applying it would count records
                twice.
        """
        start, stop = batch.first, batch.first + batch.count
        applied = self._applied.get(batch.epoch)
        if applied is None or not applied.overlaps(start, stop):
            return False
        if not applied.contains(start, stop):
            raise InvalidArgument(
                f"{batch} were applied in part; expected a batch applied whole or not at all"
            )
        return True

    def skipped(self, batch: BatchId) -> bool:
        """Whether ``batch`` was recorded as skipped, at least in part."""
        start, stop = batch.first, batch.first + batch.count
        return self._skipped.get(batch.epoch, IntervalSet()).overlaps(start, stop)

    def add(self, batch: BatchId, *, skipped: bool = False, totals: Sequence[float] = ()) -> None:
        """Records ``batch`` and adds ``totals`` to those of its epoch. ``skipped`` says that its
        gradient was not finite."""
        start, stop = batch.first, batch.first + batch.count
        if totals:
            self._count(batch.epoch, totals)
        self._applied.setdefault(batch.epoch, IntervalSet()).add(start, stop)
        if skipped:
            self._skipped.setdefault(batch.epoch, IntervalSet()).add(start, stop)
        self._publish(batch.epoch, batch.count)

    def _count(self, epoch: int, totals: Sequence[float]) -> None:
        known = self._totals.get(epoch)
        added = tuple(totals) if known is None else add_totals(known, totals)
        if not all(map(math.isfinite, added)):
            return
        self._totals[epoch] = added
        if known is None:
            while sum(map(len, self._totals.values())) > KEPT_VALUES:
                oldest = min(self._totals)
                del self._totals[oldest]
                self._published.pop(oldest, None)

    def _publish(self, epoch: int, records: int) -> None:
        """Publishes the totals of ``epoch`` after ``records`` more records."""
        totals = self._totals.get(epoch)
        if totals is not None:
            known = self._published.get(epoch)
            # Summing all intervals each time would be slow with many gaps.
            records = len(self._applied[epoch]) if known is None else known.records + records
            self._published[epoch] = EpochTotals(epoch, records, totals)

    def newest_totals(self) -> list[EpochTotals]:
        """Returns the totals of the newest epochs. Any thread may call it."""
        # sorted() copies the values in one atomic step.
        return sorted(self._published.values())[-NEWEST:]

    def to_epochs(self) -> list[AppliedEpoch]:
        """Returns the set as plain JSON values, epochs ascending."""
        epochs = [
            AppliedEpoch(
                epoch=epoch,
                applied=_intervals(applied),
                skipped=_intervals(self._skipped.get(epoch, IntervalSet())),
            )
            for epoch, applied in sorted(self._applied.items())
        ]
        for item in epochs:
            if item["epoch"] in self._totals:
                item["totals"] = list(self._totals[item["epoch"]])
        return epochs

    @staticmethod
    def from_epochs(epochs: Iterable[AppliedEpoch] | Iterable[Mapping[str, object]]) -> AppliedSet:
        """The inverse of :meth:`to_epochs`.

        Raises:
            InvalidArgument: the argument is not a list of epochs with intervals.
        """
        made = AppliedSet()
        for item in epochs:
            try:
                epoch = item["epoch"]
                if not isinstance(epoch, int):
                    raise TypeError(f"epoch is {epoch!r}")
                made._applied[epoch] = _interval_set(item["applied"])
                skipped = _interval_set(item["skipped"])
                totals = _totals(item.get("totals", ()))
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidArgument(
                    f"applied-set entry {item!r} is not an epoch with intervals: {error}"
                ) from None
            if len(skipped):
                made._skipped[epoch] = skipped
            if totals:
                made._totals[epoch] = totals
                made._publish(epoch, 0)
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AppliedSet) and self.to_epochs() == other.to_epochs()

    __hash__ = None  # type: ignore[assignment]  # mutable


def _intervals(members: IntervalSet) -> list[list[int]]:
    return [[start, stop] for start, stop in members]


def epoch_totals(epochs: Iterable[AppliedEpoch]) -> list[EpochTotals]:
    """Extracts the totals from an applied-set in plain JSON."""
    return [
        EpochTotals(
            item["epoch"],
            sum(stop - start for start, stop in item["applied"]),
            tuple(item["totals"]),
        )
        for item in epochs
        if item.get("totals")
    ]


def _totals(values: object) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or not (
        len(values) == 0 or LOSS <= len(values) <= MAX_VALUES
    ):
        raise TypeError(f"totals are {values!r}")
    return tuple(map(float, values))


def _interval_set(intervals: object) -> IntervalSet:
    if not isinstance(intervals, Sequence):
        raise TypeError(f"intervals are {intervals!r}")
    return IntervalSet((int(start), int(stop)) for start, stop in intervals)
