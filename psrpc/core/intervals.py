"""A set of positions kept as merged, half-open intervals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator


class IntervalSet:
    """A set of non-negative integers that needs little memory if most members are adjacent. An
    epoch whose batches are all done is one interval, in whatever order they were done. Not
    thread-safe.
    """

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in intervals:
            self.add(start, stop)

    def add(self, start: int, stop: int) -> None:
        """Adds ``[start, stop)`` and merges it with overlapping and adjacent intervals."""
        if not 0 <= start < stop:
            raise ValueError(f"not an interval: [{start}, {stop})")
        left = bisect_right(self._starts, start)
        if left and self._stops[left - 1] >= start:
            left -= 1
            start = self._starts[left]
        right = left
        while right < len(self._starts) and self._starts[right] <= stop:
            stop = max(stop, self._stops[right])
            right += 1
        self._starts[left:right] = [start]
        self._stops[left:right] = [stop]

    def contains(self, start: int, stop: int) -> bool:
        """Whether every member of ``[start, stop)`` is in the set."""
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and stop <= self._stops[at]

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any member of ``[start, stop)`` is in the set."""
        at = bisect_right(self._starts, stop - 1) - 1
        return at >= 0 and start < self._stops[at]

    def end_of(self, member: int) -> int:
        """Returns the smallest integer, at least ``member``, that is not in the set."""
        at = bisect_right(self._starts, member) - 1
        return max(member, self._stops[at]) if at >= 0 else member

    def intersection(self, other: IntervalSet) -> IntervalSet:
        """Returns the members of both sets, as a new set."""
        common = IntervalSet()
        mine, theirs = list(self), list(other)
        i = j = 0
        while i < len(mine) and j < len(theirs):
            start, stop = max(mine[i][0], theirs[j][0]), min(mine[i][1], theirs[j][1])
            if start < stop:
                common.add(start, stop)
            if mine[i][1] < theirs[j][1]:
                i += 1
            else:
                j += 1
        return common

    def __len__(self) -> int:
        """Number of integers, not of intervals."""
        return sum(self._stops) - sum(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yields the intervals ``(start, stop)`` in rising order."""
        return iter(zip(self._starts, self._stops, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IntervalSet) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"IntervalSet({list(self)!r})"
