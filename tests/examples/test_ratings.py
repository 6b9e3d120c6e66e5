"""Ratings of MovieLens: files, the split, and what is made up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.ratings import Ratings, load_ratings, read_ratings, synthetic_ratings
from psrpc.core.errors import InvalidJob


@pytest.mark.parametrize(
    "text",
    ["7\t3\t4\t881250949\n8\t2\t1\t881250950", "7::3::4::881250949\n8::2::1::881250950\n"],
)
def test_files_of_both_forms_are_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ratings"
    path.write_text(text)
    ratings = load_ratings(str(path))
    assert ratings.users.tolist() == [7, 8]
    assert ratings.items.tolist() == [3, 2]
    assert ratings.stars.tolist() == [4, 1]
    assert ratings.stars.dtype == np.float32


@pytest.mark.parametrize(
    "line",
    [
        "7\t3\t4",
        "7\tx\t4\t0",
        "",
        "7,3,4,0",
        "-7\t3\t4\t0",
        f"7\t{2**64}\t4\t0",
        "7\t3\tnan\t0",
        "7\t3\t-1\t0",
    ],
)
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "u.data"
    path.write_text(f"7\t3\t4\t0\n{line}\n7\t3\t4\t0\n")
    with pytest.raises(InvalidJob, match=r"u.data' line 2 is .*; expected user, item, rating"):
        read_ratings(path)


def test_without_data_the_error_says_where_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for data in ("", str(tmp_path / "absent"), str(tmp_path / "empty")):
        with pytest.raises(InvalidJob, match=r"https://grouplens.org.*--set data="):
            load_ratings(data)


def test_the_split_is_seeded_and_loses_nothing() -> None:
    ratings = Ratings(np.arange(1005), np.arange(1005) + 1, np.zeros(1005, np.float32))
    train, test = ratings.split(0.1, seed=3)
    assert (len(train), len(test)) == (905, 100)
    assert sorted([*train.users, *test.users]) == list(range(1005))
    assert (train.items == train.users + 1).all()
    again, _ = ratings.split(0.1, seed=3)
    other, _ = ratings.split(0.1, seed=4)
    assert np.array_equal(train.users, again.users)
    assert not np.array_equal(train.users, other.users)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_too_few_ratings_to_hold_some_out(count: int) -> None:
    few = Ratings(np.arange(count), np.arange(count), np.zeros(count, np.float32))
    with pytest.raises(InvalidJob, match=f"there are {count} ratings, of which 10% are to be held"):
        few.split(0.1, seed=0)


def test_made_up_ratings_are_seeded_and_like_real_ones() -> None:
    ratings, again = (synthetic_ratings(50, 40, 5000, seed=1) for _ in range(2))
    assert np.array_equal(ratings.stars, again.stars)
    assert set(ratings.stars.tolist()) == {1, 2, 3, 4, 5}
    assert set(ratings.users.tolist()) == set(range(50))
    assert set(ratings.items.tolist()) == set(range(40))
    counts = np.bincount(ratings.items)
    assert counts[0] > 5 * counts[20]
