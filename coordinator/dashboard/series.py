"""Curves of bounded length: the last minutes second by second, the whole run thinned. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from psrpc.core.document import listed, maybe, real, record, whole

RECENT = 600
"""Points that are kept as they came."""

WHOLE = 1024
"""Points of the whole run, at most."""


@dataclass(frozen=True, slots=True)
class Point:
    """Some seconds of a job: ``at`` is when they ended (Unix time, seconds) and ``step`` the global
    step by then, the others are means. None is what was not known; a point that knows nothing is a
    gap."""

    at: float
    step: int
    loss: float | None = None
    examples_per_s: float | None = None
    steps_per_s: float | None = None
    staleness: float | None = None
    workers: float | None = None


MEANS = tuple(field.name for field in fields(Point))[2:]
"""What a point has besides its place."""


def mean_point(points: Sequence[Point]) -> Point:
    """What several points in a row, at least one, come to."""
    return Point(
        points[-1].at,
        points[-1].step,
        **{name: _mean(getattr(point, name) for point in points) for name in MEANS},
    )


class Points:
    """Takes a point at a time, in the order of time. Not thread-safe.

    The whole run is kept as means of ``width`` points each. When there are too many, every two
    become one and ``width`` doubles.
    """

    def __init__(self, recent: int = RECENT, whole: int = WHOLE) -> None:
        """``whole`` is even."""
        self._recent: deque[Point] = deque(maxlen=recent)
        self._whole: list[Point] = []
        self._open: list[Point] = []
        self._most = whole
        self.width = 1

    def add(self, point: Point) -> None:
        """The newest point."""
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
        """The newest ones, oldest first."""
        return list(self._recent)

    @property
    def whole(self) -> list[Point]:
        """All, oldest first; the last one may still change."""
        return [*self._whole, *([mean_point(self._open)] if self._open else [])]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; the inverse of :meth:`from_json`."""
        return {
            "width": self.width,
            "whole": columns(self.whole),
            "recent": columns(self.recent),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Points:
        """As it was stored.

        Raises:
            ValueError: it is not such a document.
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
    """By name, one entry per point."""
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
