"""Ratings of items by users: MovieLens, or made up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from psrpc.core.errors import InvalidJob
from worker.data.permutation import permutation

Ints = npt.NDArray[np.int64]

WHERE = (
    "download MovieLens 100K or 1M from https://grouplens.org/datasets/movielens/ and say where "
    "its ratings are: --set data=ml-100k/u.data (or ml-1m/ratings.dat); --set data=synthetic makes "
    "ratings up"
)
SYNTHETIC_SEED = 11
_FACTORS = 4


@dataclass(frozen=True)
class Ratings:
    """``n`` ratings: int64 ids and float32 stars, each ``[n]``."""

    users: Ints
    items: Ints
    stars: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.stars)

    def take(self, places: Ints) -> Ratings:
        """Those at ``places``, in this order."""
        return Ratings(self.users[places], self.items[places], self.stars[places])

    def split(self, share: float, seed: int) -> tuple[Ratings, Ratings]:
        """All but ``share`` of the ratings, and ``share`` of them, drawn by ``seed``.

        Raises:
            InvalidJob: there are too few.
        """
        places = permutation(len(self), seed)
        held_out = round(share * len(self))
        if not 0 < held_out < len(self):
            raise InvalidJob(
                f"there are {len(self)} ratings, of which {share:.0%} are to be held out; give more"
            )
        return self.take(places[held_out:]), self.take(places[:held_out])


def load_ratings(data: str) -> Ratings:
    """Loads the data that ``--set data=...`` names: a file, the directory of MovieLens 100K, or
    ``synthetic``.

    Raises:
        InvalidJob: there is no such file, or it holds something else; the message says what to do,
            or names the line.
    """
    if data == "synthetic":
        return synthetic_ratings(400, 300, 20_000, SYNTHETIC_SEED)
    if not data:
        raise InvalidJob(f"this example needs ratings: {WHERE}")
    path = Path(data)
    if (path / "u.data").is_file():
        path /= "u.data"
    if not path.is_file():
        raise InvalidJob(f"there is no file {data!r} (in {Path.cwd()}); {WHERE}")
    return read_ratings(path)


def read_ratings(path: Path) -> Ratings:
    """A file of lines ``user, item, rating, timestamp`` with tabs (100K) or ``::`` (1M) between.

    Raises:
        InvalidJob: a line is no rating; names the file and the line.
    """
    users, items, stars = [], [], []
    with path.open(encoding="latin-1") as file:
        for number, line in enumerate(file, start=1):
            try:
                user, item, rating, _ = line.replace("::", "\t").split("\t")
                users.append(_id(user))
                items.append(_id(item))
                stars.append(_stars(rating))
            except ValueError:
                raise InvalidJob(
                    f"{str(path)!r} line {number} is {line.rstrip()[:60]!r}; expected user, item, "
                    "rating and timestamp with tabs or :: between them, as numbers, none of them "
                    "negative"
                ) from None
    if not stars:
        raise InvalidJob(f"{str(path)!r} is empty; {WHERE}")
    return Ratings(np.array(users), np.array(items), np.array(stars, np.float32))


def _id(cell: str) -> int:
    value = int(cell)
    if not 0 <= value < 1 << 62:
        raise ValueError
    return value


def _stars(cell: str) -> float:
    value = float(cell)
    if not 0 <= value < math.inf:
        raise ValueError
    return value


def synthetic_ratings(users: int, items: int, count: int, seed: int) -> Ratings:
    """``count`` ratings from 1 to 5 of popular items by busy users (ids from 0, 0 the most frequent
    one), rounded from a bias of each, the product of two hidden vectors, and noise of 0.5."""
    random = np.random.default_rng(seed)
    # Zipf's law, nearly: the logarithm of a rank is uniform.
    user, item = (
        np.floor(np.exp(random.random(count) * np.log(n + 1))).astype(np.int64) - 1
        for n in (users, items)
    )
    biases = [random.normal(scale=0.4, size=n) for n in (users, items)]
    hidden = [random.normal(scale=0.6, size=(n, _FACTORS)) for n in (users, items)]
    exact = 3.5 + biases[0][user] + biases[1][item]
    exact += (hidden[0][user] * hidden[1][item]).sum(axis=1) + random.normal(scale=0.5, size=count)
    return Ratings(user, item, np.clip(np.rint(exact), 1, 5).astype(np.float32))
