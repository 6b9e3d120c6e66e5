"""Which batches a shard has applied: what makes a repeated push harmless."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from psrpc.batch import BatchId
from psrpc.errors import InvalidArgument
from psrpc.intervals import IntervalSet


class AppliedEpoch(TypedDict):
    """One epoch of an applied-set as plain JSON; the fields of the message of the same name."""

    epoch: int
    applied: list[list[int]]
    skipped: list[list[int]]


class AppliedSet:
    """The positions of every epoch that a shard has applied or recorded as skipped.

    Its size is the number of gaps, not of batches: an epoch that is done is one interval.
    Not thread-safe.
    """

    def __init__(self) -> None:
        self._applied: dict[int, IntervalSet] = {}
        self._skipped: dict[int, IntervalSet] = {}

    def contains(self, batch: BatchId) -> bool:
        """Whether ``batch`` was applied or skipped before.

        Raises:
            InvalidArgument: part of it was. Batches are cut once and never change, so somebody
                counts otherwise than this shard; applying it would count records twice.
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

    def add(self, batch: BatchId, *, skipped: bool = False) -> None:
        """Records ``batch``; ``skipped`` when its gradient was not finite."""
        start, stop = batch.first, batch.first + batch.count
        self._applied.setdefault(batch.epoch, IntervalSet()).add(start, stop)
        if skipped:
            self._skipped.setdefault(batch.epoch, IntervalSet()).add(start, stop)

    def to_epochs(self) -> list[AppliedEpoch]:
        """The set as plain JSON, epochs in rising order."""
        return [
            AppliedEpoch(
                epoch=epoch,
                applied=_intervals(applied),
                skipped=_intervals(self._skipped.get(epoch, IntervalSet())),
            )
            for epoch, applied in sorted(self._applied.items())
        ]

    @staticmethod
    def from_epochs(epochs: Iterable[AppliedEpoch] | Iterable[Mapping[str, object]]) -> AppliedSet:
        """The inverse of :meth:`to_epochs`.

        Raises:
            InvalidArgument: that is not a list of epochs with their intervals.
        """
        made = AppliedSet()
        for item in epochs:
            try:
                epoch = item["epoch"]
                if not isinstance(epoch, int):
                    raise TypeError(f"epoch is {epoch!r}")
                made._applied[epoch] = _interval_set(item["applied"])
                skipped = _interval_set(item["skipped"])
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidArgument(
                    f"applied-set entry {item!r} is not an epoch with intervals: {error}"
                ) from None
            if len(skipped):
                made._skipped[epoch] = skipped
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AppliedSet) and self.to_epochs() == other.to_epochs()

    __hash__ = None  # type: ignore[assignment]  # mutable


def _intervals(members: IntervalSet) -> list[list[int]]:
    return [[start, stop] for start, stop in members]


def _interval_set(intervals: object) -> IntervalSet:
    if not isinstance(intervals, Sequence):
        raise TypeError(f"intervals are {intervals!r}")
    return IntervalSet((int(start), int(stop)) for start, stop in intervals)
