"""Curves of bounded length: the last minutes by second, the whole run thinned out. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from psrpc.core.document import listed, maybe, real, record, whole

RECENT = 600
"""Number of newest points kept unchanged."""

WHOLE = 1024
"""Maximum of points for the whole run."""


@dataclass(frozen=True, slots=True)
class Point:
    """A time span of a job. ``at`` is its end (Unix time in seconds), ``step`` the global step at
    that time; the other fields are means. None is an unknown value; a point of unknown values is a
    gap."""

    at: float
    step: int
    loss: float | None = None
    examples_per_s: float | None = None
    steps_per_s: float | None = None
    staleness: float | None = None
    workers: float | None = None


MEANS = tuple(field.name for field in fields(Point))[2:]
"""The fields of a point that are means."""


def mean_point(points: Sequence[Point]) -> Point:
    """Returns the mean of one or more successive points."""
    return Point(
        points[-1].at,
        points[-1].step,
        **{name: _mean(getattr(point, name) for point in points) for name in MEANS},
    )


class Points:
    """Takes one point at a time, in the order of time. Not thread-safe.

    Keeps the whole run as means of ``width`` points each. When there are too many, it merges them
    in pairs and doubles ``width``.
    """

    def __init__(self, recent: int = RECENT, whole: int = WHOLE) -> None:
        """``whole`` must be even."""
        self._recent: deque[Point] = deque(maxlen=recent)
        self._whole: list[Point] = []
        self._open: list[Point] = []
        self._most = whole
        self.width = 1

    def add(self, point: Point) -> None:
        """Adds the newest point."""
        self._recent.append(point)
        self._open.append(point)
        if len(self._open) < self.width:
            return
        self._whole.append(mean_point(self._open))
        self._open = []
        if len(self._whole) == self._most:
            pairs = range(0, self._most, 2)
            self._whole = [mean_point(self._whole[first : first + 2]) for first in pairs]
            self.width *= 2

    @property
    def recent(self) -> list[Point]:
        """The newest points, oldest first."""
        return list(self._recent)

    @property
    def whole(self) -> list[Point]:
        """The points of the whole run, oldest first; the last one may still change."""
        return [*self._whole, *([mean_point(self._open)] if self._open else [])]

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON types; the inverse of :meth:`from_json`."""
        return {
            "width": self.width,
            "whole": columns(self.whole),
            "recent": columns(self.recent),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Points:
        """Restores stored points.

        Raises:
            ValueError: the document is not valid.
        """
        _KEPT(document, "")
        made = Points()
        made._recent.extend(rows(document["recent"]))
        made._whole = rows(document["whole"])
        made.width = document["width"]
        if len(made._whole) >= made._most:
            raise ValueError(f"{len(made._whole)} points of width {made.width}")
        return made


def columns(points: Sequence[Point]) -> dict[str, list[float | None]]:
    """Returns one column per field, with an entry per point."""
    names = (field.name for field in fields(Point))
    return {name: [getattr(point, name) for point in points] for name in names}


def rows(document: Mapping[str, Sequence[float | None]]) -> list[Point]:
    """The inverse of :func:`columns`. Raises ValueError."""
    kept: Any = _COLUMNS(document, "")
    return [Point(*point) for point in zip(*(kept[f.name] for f in fields(Point)), strict=True)]


_COLUMNS = record(
    {"at": listed(real), "step": listed(whole())} | dict.fromkeys(MEANS, listed(maybe(real))),
    more=True,
)
_KEPT = record({"width": whole(1), "whole": _COLUMNS, "recent": _COLUMNS}, more=True)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
