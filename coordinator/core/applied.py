"""Compares the applied-sets of several shards. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from psrpc.core.intervals import IntervalSet
from psrpc.core.shard_reports import Positions

_NONE = (sys.maxsize, sys.maxsize)


def common_positions(sets: Sequence[Positions]) -> dict[int, IntervalSet]:
    """Returns the positions that are in all sets, per epoch."""
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
    """Returns the positions that are in some sets and not in ``common``, per epoch that has any."""
    partial: dict[int, IntervalSet] = {}
    for epoch in sorted({epoch for one in sets for epoch in one}):
        # Sorted, so that each interval is appended, and both sides are scanned once.
        union = IntervalSet(sorted(i for one in sets for i in one.get(epoch, ())))
        left = IntervalSet()
        inside = iter(common.get(epoch, ()))
        first, last = next(inside, _NONE)
        for start, stop in union:
            while first < stop:
                if start < first:
                    left.add(start, first)
                start = max(start, last)
                first, last = next(inside, _NONE)
            if start < stop:
                left.add(start, stop)
        if len(left):
            partial[epoch] = left
    return partial
