"""What several shards have applied: in common, and apart. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.work import Positions
from psrpc.intervals import IntervalSet


def common_positions(sets: Sequence[Positions]) -> dict[int, IntervalSet]:
    """The positions that are in all of several sets, per epoch."""
    common: dict[int, IntervalSet] = {}
    for epoch in set.intersection(*(set(one) for one in sets)) if sets else set():
        first, *others = (one[epoch] for one in sets)
        for other in others:
            first = first.intersection(other)
        common[epoch] = first
    return common


def partial_positions(
    sets: Sequence[Positions], common: Mapping[int, IntervalSet]
) -> dict[int, IntervalSet]:
    """The positions that are in some of the sets and not in ``common``, per epoch; epochs without
    any are left out."""
    partial: dict[int, IntervalSet] = {}
    for epoch in sorted({epoch for one in sets for epoch in one}):
        union = IntervalSet(interval for one in sets for interval in one.get(epoch, ()))
        left = IntervalSet()
        for start, stop in union:
            for first, last in common.get(epoch, ()):
                if last <= start or first >= stop:
                    continue
                if start < first:
                    left.add(start, first)
                start = last
            if start < stop:
                left.add(start, stop)
        if len(left):
            partial[epoch] = left
    return partial
