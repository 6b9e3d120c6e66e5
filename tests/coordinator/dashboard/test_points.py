"""Curves of bounded length."""

from __future__ import annotations

import json

import pytest

from coordinator.dashboard.series import Point, Points, columns, mean_point, rows


def line(count: int) -> list[Point]:
    """One point a second, on a straight line."""
    return [Point(at=float(i), step=10 * i, loss=float(i), workers=2.0) for i in range(count)]


def filled(count: int, recent: int = 4, whole: int = 8) -> Points:
    points = Points(recent, whole)
    for point in line(count):
        points.add(point)
    return points


def test_a_short_run_is_kept_as_it_came() -> None:
    points = filled(4)
    assert points.recent == points.whole == line(4)
    assert points.width == 1


def test_a_long_run_is_thinned_and_stays_bounded() -> None:
    points = filled(1000)
    assert points.recent == line(1000)[-4:]
    assert points.width == 128
    ends = [float(end) for end in range(127, 896, 128)]
    assert [point.at for point in points.whole] == [*ends, 999.0]
    # Each is the mean of its 128; the last one is not full yet.
    assert [point.loss for point in points.whole] == [*(end - 63.5 for end in ends), 947.5]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_the_newest_point_is_always_there(count: int) -> None:
    points = filled(count)
    assert len(points.whole) <= 8
    assert [p.at for p in points.whole] == sorted(p.at for p in points.whole)
    assert (points.whole[-1].at if count else -1) == count - 1


def test_a_mean_leaves_out_what_is_not_known() -> None:
    met = mean_point([Point(1.0, 1), Point(2.0, 5, loss=4.0), Point(3.0, 7, loss=2.0)])
    assert met == Point(3.0, 7, loss=3.0)
    assert mean_point([Point(1.0, 1), Point(2.0, 2)]) == Point(2.0, 2)


def test_points_come_back_as_they_were_stored() -> None:
    points = filled(20)
    points.add(Point(20.0, 5))
    again = Points.from_json(json.loads(json.dumps(points.to_json())))
    assert again.recent == points.recent
    assert again.whole == points.whole
    assert again.width == points.width


@pytest.mark.parametrize(
    "change",
    [
        {"width": 0},
        {"width": "many"},
        {"whole": {}},
        {"whole": columns(line(3000))},
        {"recent": {**columns(line(2)), "loss": [1.0]}},
        {"recent": {**columns(line(2)), "loss": ["<img>", 1.0]}},
        {"recent": {**columns(line(2)), "at": [None, 1.0]}},
        {"recent": {**columns(line(2)), "at": [float("nan"), 1.0]}},
    ],
)
def test_anything_else_is_refused(change: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Points.from_json({**filled(3).to_json(), **change})


def test_columns_and_rows_are_inverses() -> None:
    points = [*line(3), Point(3.0, 30)]
    assert rows(columns(points)) == points
