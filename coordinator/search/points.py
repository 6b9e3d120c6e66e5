"""The space of a study: a range for each of its settings, and its points."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.search.space import Alternatives, Range, RealRange, Value, WholeRange, read_range
from psrpc.core.errors import InvalidArgument

Point = Mapping[str, Value]
"""A value for each setting of a space."""

OWN = "setting."
"""Optional prefix of a key that is a job file's own ``setting``; ``--set`` has the key without."""

MOST_POINTS = 1_000_000
"""Most points of a grid."""


@dataclass(frozen=True)
class Space:
    """The ranges of a study by setting, as ``--set`` names them, in the order they were given."""

    ranges: Mapping[str, Range]

    def to_json(self) -> dict[str, str]:
        """Returns the text of each range."""
        return {key: str(each) for key, each in self.ranges.items()}

    @property
    def corners(self) -> list[Point]:
        """Points that together have each end of each range and each value of each list. A study
        describes the job at these to find values that the job refuses before anything starts."""
        most = max(len(each.ends) for each in self.ranges.values())
        return [
            {key: each.ends[min(at, len(each.ends) - 1)] for key, each in self.ranges.items()}
            for at in range(most)
        ]

    @property
    def grid_size(self) -> int:
        """The number of points of a grid.

        Raises:
            InvalidArgument: a range is continuous, or the grid too large.
        """
        for key, each in self.ranges.items():
            if isinstance(each, RealRange):
                low, high = each.low, each.high
                raise InvalidArgument(
                    f"--sampler grid: {key} is {each}, which has no next value; list the values of "
                    f"the grid, as in {key}=choice({low!r}, {high!r})"
                )
        size = math.prod(len(_listed(each)) for each in self.ranges.values())
        if size > MOST_POINTS:
            raise InvalidArgument(
                f"--sampler grid: the grid has {size} points, and {MOST_POINTS} at most are "
                "searched; list fewer values"
            )
        return size

    def grid_point(self, number: int) -> Point:
        """Returns a point of the grid; from one number to the next, the last setting changes."""
        values = [_listed(each) for each in self.ranges.values()]
        point = next(itertools.islice(itertools.product(*values), number, None))
        return dict(zip(self.ranges, point, strict=True))

    @property
    def pairs(self) -> int:
        """The number of points of paired lists.

        Raises:
            InvalidArgument: there are ranges beside lists, or lists of different lengths.
        """
        lengths = {}
        for key, each in self.ranges.items():
            if not isinstance(each, Alternatives):
                raise InvalidArgument(
                    f"--sampler zip: {key} is {each}; it pairs lists: {key}=choice(A, B, ...)"
                )
            lengths[key] = len(each.values)
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{key} {length}" for key, length in lengths.items())
            raise InvalidArgument(
                f"--sampler zip: the lists have different lengths ({said}); give each setting as "
                "many values as the others have"
            )
        return next(iter(lengths.values()))

    def pair(self, number: int) -> Point:
        """Returns the values at one place of paired lists."""
        return {key: each.ends[number] for key, each in self.ranges.items()}

    def random_point(self, seed: int, number: int) -> Point:
        """Returns the random point of a trial, which depends on ``seed`` and ``number`` alone."""
        places = random.Random(f"{seed} {number}")
        return {key: each.at(places.random()) for key, each in self.ranges.items()}


def _listed(each: Range) -> Sequence[Value]:
    if isinstance(each, WholeRange):
        return range(each.low, each.high + 1)
    return each.ends


def read_space(texts: Mapping[str, str]) -> Space:
    """Reads the text of each range by setting.

    Raises:
        InvalidArgument: a text is no range, a setting is there twice, or there is none; names the
            setting.
    """
    ranges: dict[str, Range] = {}
    for name, text in texts.items():
        key = name.strip().removeprefix(OWN)
        try:
            found = read_range(text)
        except InvalidArgument as error:
            raise InvalidArgument(f"the space of {name.strip()}: {error}") from None
        if key in ranges:
            raise InvalidArgument(f"the space has {key} twice; leave one out")
        ranges[key] = found
    if not ranges:
        raise InvalidArgument("the space is empty; name at least one setting")
    return Space(ranges)


def split_options(options: Iterable[str]) -> dict[str, str]:
    """Splits options ``--space KEY=RANGE``.

    Raises:
        InvalidArgument: one has no ``=``, or a setting is named twice.
    """
    texts: dict[str, str] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals or not key.strip():
            raise InvalidArgument(
                f"--space {option!r}: expected KEY=RANGE, for example "
                "'optimizer.learning_rate=log(1e-4, 1e-1)'"
            )
        if key.strip() in texts:
            raise InvalidArgument(f"--space has {key.strip()} twice; leave one out")
        texts[key.strip()] = text
    return texts


def overrides_of(point: Point) -> tuple[str, ...]:
    """Returns a point as values of ``--set``."""
    return tuple(f"{key}={_text(value)}" for key, value in point.items())


def in_words_of_space(message: str, point: Point) -> str:
    """Returns a message about a job at ``point`` with the settings named as those of the space, or
    with the values of the settings that it names: users have not typed the ``--set`` that it has.
    """
    for key, override in zip(point, overrides_of(point), strict=True):
        message = message.replace(f"--set {override}:", f"the space of {key}:")
    last = message.rstrip().rpartition("\n")[2]
    named = [
        override
        for key, override in zip(point, overrides_of(point), strict=True)
        if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", last)
    ]
    if not named or "the space of" in last:
        return message
    return f"{message.rstrip()} (the space has {', '.join(named)})"


def _text(value: Value) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else repr(value)
