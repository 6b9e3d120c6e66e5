"""Ranges of settings: what they take, what they refuse, and their points."""

from __future__ import annotations

import pytest

from coordinator.search.points import Point, Space, overrides_of, read_space, split_options
from coordinator.search.space import (
    Alternatives,
    RealRange,
    WholeRange,
    choice,
    integers,
    log,
    log_integers,
    read_range,
    uniform,
)
from psrpc.core.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("log(1e-4, 1e-1)", RealRange(1e-4, 0.1, log=True)),
        (" uniform(-1,0.5) ", RealRange(-1.0, 0.5)),
        ("integers(1, 8)", WholeRange(1, 8)),
        ("log_integers(8, 512)", WholeRange(8, 512, log=True)),
        ("choice(32, 64)", Alternatives((32, 64))),
        ("choice(relu, 'tanh', none, true)", Alternatives(("relu", "tanh", None, True))),
        ("[0.1, 0.2]", Alternatives((0.1, 0.2))),
    ],
)
def test_a_range_is_read_and_written(text: str, found: object) -> None:
    assert read_range(text) == found
    assert read_range(str(found)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("log(0.1, 0.01)", "is reversed; say the smaller value first: 0.01, 0.1"),
        ("uniform(1, 1)", "is one value; expected two different ones, or --set KEY=1.0"),
        ("uniform(1, 1e999)", "is not an interval; expected two finite numbers"),
        ("log(0, 1)", "a logarithm needs values above 0, or say uniform(0.0, 1.0)"),
        ("integers(8, 1)", "is reversed; say the smaller value first: 1, 8"),
        ("integers(1, 2.5)", "the highest value of integers is 2.5; expected a whole number"),
        ("log(a, 1)", "the lowest value of log is 'a'; expected a number, as in log("),
        ("log(1)", "has 1 value; expected the lowest and the highest: log(LOW, HIGH)"),
        (
            "log_integers(0, 8)",
            "a logarithm needs whole numbers of at least 1, or say integers(0, 8)",
        ),
        ("log_integers(true, 8)", "the lowest value of log_integers is True; expected a whole"),
        ("choice()", "choice() has no values"),
        ("choice(1, 2, 1)", "has 1 twice; leave one out"),
        ("choice([1])", "choice has [1]; expected texts, numbers"),
        ("choice(a+b)", "has the value a + b; put quotes around a text"),
        ("normal(0, 1)", "is no range of values; expected log(LOW, HIGH)"),
        ("integer(1, 8)", "is no range of values; did you mean integers?"),
        ("log(low=1)", "is no range of values"),
        ("0.1", "is no range of values"),
        ("log(", "is no range of values"),
    ],
)
def test_what_is_no_range_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read_space({"width": text})
    assert str(refused.value).startswith("the space of width: ")
    assert words in str(refused.value)


def test_options_are_split_at_the_first_equals_sign() -> None:
    texts = split_options(
        ["optimizer.learning_rate=log(1e-4,1e-1)", "setting.kind=choice('a=b',c)"]
    )
    space = read_space(texts)
    # `--set` has no prefix for a job file's own settings.
    assert space == Space({"optimizer.learning_rate": log(1e-4, 0.1), "kind": choice("a=b", "c")})
    assert read_space(space.to_json()) == space
    for options, words in (
        (["width"], "--space 'width': expected KEY=RANGE"),
        (["width=[1]", "width=[2]"], "--space has width twice"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            split_options(options)
        assert words in str(refused.value)
    with pytest.raises(InvalidArgument, match="the space has width twice"):
        read_space({"width": "[1]", "setting.width": "[2]"})
    with pytest.raises(InvalidArgument, match="the space is empty"):
        read_space({})


def test_a_point_is_written_as_settings() -> None:
    point: Point = {"a": 1e-4, "b": 32, "c": "relu", "d": True, "e": None}
    assert overrides_of(point) == ("a=0.0001", "b=32", "c=relu", "d=true", "e=none")


def test_a_grid_has_every_point_once_and_the_last_setting_changes_first() -> None:
    space = Space({"rate": choice(0.1, 0.2), "depth": integers(1, 3)})
    assert space.grid_size == 6
    points = [tuple(space.grid_point(number).values()) for number in range(6)]
    assert points == [(0.1, 1), (0.1, 2), (0.1, 3), (0.2, 1), (0.2, 2), (0.2, 3)]
    with pytest.raises(InvalidArgument, match=r"rate is log\(.*which has no next value.*choice"):
        _ = Space({"rate": log(0.1, 1)}).grid_size
    with pytest.raises(InvalidArgument, match="1000001 points, and 1000000 at most"):
        _ = Space({"rate": integers(0, 1_000_000)}).grid_size


def test_zip_pairs_lists_of_the_same_length() -> None:
    space = Space({"rate": choice(0.1, 0.2), "dropout": choice(0.45, 0.7)})
    assert space.pairs == 2
    assert [space.pair(number) for number in range(2)] == [
        {"rate": 0.1, "dropout": 0.45},
        {"rate": 0.2, "dropout": 0.7},
    ]
    with pytest.raises(InvalidArgument, match=r"different lengths \(rate 2, dropout 3\)"):
        _ = Space({"rate": choice(1, 2), "dropout": choice(1, 2, 3)}).pairs
    with pytest.raises(InvalidArgument, match=r"rate is uniform.*it pairs lists"):
        _ = Space({"rate": uniform(0, 1)}).pairs


def test_random_points_follow_from_seed_and_number() -> None:
    space = Space(
        {
            "rate": log(1e-4, 0.1),
            "depth": integers(1, 3),
            "kind": choice("a", "b"),
            "x": uniform(0, 1),
        }
    )
    points = [space.random_point(3, number) for number in range(200)]
    assert points == [space.random_point(3, number) for number in range(200)]
    assert points[0] != space.random_point(4, 0)
    rates = [float(str(point["rate"])) for point in points]
    assert all(1e-4 <= rate <= 0.1 for rate in rates)
    # Of three orders of magnitude, each has about a third.
    assert 40 < sum(rate < 1e-3 for rate in rates) < 95
    assert {point["depth"] for point in points} == {1, 2, 3}
    assert {point["kind"] for point in points} == {"a", "b"}


def test_corners_have_every_end_of_every_range() -> None:
    space = Space({"rate": log(0.1, 1), "kind": choice("a", "b", "c")})
    assert space.corners == [
        {"rate": 0.1, "kind": "a"},
        {"rate": 1.0, "kind": "b"},
        {"rate": 1.0, "kind": "c"},
    ]


def test_whole_numbers_of_every_order_of_magnitude_are_equally_likely() -> None:
    space = Space({"width": log_integers(1, 1000)})
    found = [int(str(space.random_point(3, number)["width"])) for number in range(300)]
    assert min(found) >= 1
    assert max(found) <= 1000
    for low, high in ((1, 9), (10, 99), (100, 1000)):
        assert 60 < sum(low <= width <= high for width in found) < 140
    assert [log_integers(8, 64).at(place) for place in (0, 1)] == [8, 64]
