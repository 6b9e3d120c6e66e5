"""IntervalSet against a plain set of integers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrpc.core.intervals import IntervalSet

spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda t: (t[0], t[0] + t[1])),
    max_size=12,
)


def members(intervals: IntervalSet | list[tuple[int, int]]) -> set[int]:
    return {i for start, stop in intervals for i in range(start, stop)}


@given(spans)
def test_holds_what_was_added_in_merged_rising_intervals(added: list[tuple[int, int]]) -> None:
    intervals = IntervalSet(added)
    assert members(intervals) == members(added)
    assert len(intervals) == len(members(added))
    flat = [edge for interval in intervals for edge in interval]
    assert all(a < b for a, b in pairwise(flat)), "merged, rising, not touching"


@given(spans, st.integers(0, 70), st.integers(1, 10))
def test_contains_and_overlaps(added: list[tuple[int, int]], start: int, size: int) -> None:
    asked = set(range(start, start + size))
    intervals = IntervalSet(added)
    assert intervals.contains(start, start + size) == (asked <= members(added))
    assert intervals.overlaps(start, start + size) == bool(asked & members(added))


@given(spans, st.integers(0, 80))
def test_end_of(added: list[tuple[int, int]], member: int) -> None:
    end = member
    while end in members(added):
        end += 1
    assert IntervalSet(added).end_of(member) == end


@given(spans, spans)
def test_intersection(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    common = IntervalSet(left).intersection(IntervalSet(right))
    assert members(common) == members(left) & members(right)
    assert common == IntervalSet(common)


def test_an_epoch_done_in_any_order_is_one_interval() -> None:
    intervals = IntervalSet()
    for batch in [*range(0, 1000, 2), *range(999, 0, -2)]:
        intervals.add(batch * 50, batch * 50 + 50)
    assert list(intervals) == [(0, 50_000)]


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (4, 3), (-1, 2)])
def test_an_empty_or_negative_interval_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not an interval"):
        IntervalSet().add(start, stop)
