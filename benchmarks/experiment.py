"""One experiment: what it runs, one by one, and what is made of the figures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster import RunFailed
from benchmarks.report import say, write_json

Figures = Mapping[str, Any]
"""What one run gave, plain JSON; ``miss`` alone, in words, if it gave nothing."""

Found = Mapping[str, Figures]
"""By the name of the run."""


@dataclass(frozen=True)
class Experiment:
    """An experiment that ``benchmarks.consistency`` runs under a number.

    Attributes:
        minutes: what all its runs take on a machine of two cores.
        names: of its runs, in order; ``small`` ones are there to try the script.
        measure: one run, by its name and whether it is a small one. Raises RunFailed.
        table: Markdown of what was found; runs may be missing.
        plot: the same as a picture, PNG, at a path.
    """

    number: int
    title: str
    minutes: float
    names: Callable[[bool], Sequence[str]]
    measure: Callable[[str, bool], Figures]
    table: Callable[[Found], str]
    plot: Callable[[Found, Path], None]

    @property
    def section(self) -> str:
        """Between whose markers the table stands in the page."""
        return f"experiment-{self.number}"


class Results:
    """The raw figures of one experiment, in a JSON file that is written after each run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Figures] = {}
        if path.exists():
            self.found = json.loads(path.read_text())["runs"]

    def put(self, name: str, figures: Figures) -> None:
        """Keeps what a run gave."""
        self.found[name] = figures
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {"runs": self.found})


def left(names: Sequence[str], found: Found, only: Sequence[str], again: bool) -> Iterator[str]:
    """Runs without a valid result; with ``again`` all. ``only`` are parts of names, of which one
    has to be in each; none means all."""
    for name in names:
        wanted = not only or any(part in name for part in only)
        if wanted and (again or name not in found or "miss" in found[name]):
            yield name


def run(
    experiment: Experiment,
    results: Results,
    names: Sequence[str],
    small: bool,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Runs ``names`` one by one until ``limit_s`` are over; whether none is left.

    A run that gives no figure is kept as a miss, with the reason.
    """
    began = clock()
    for name in names:
        if clock() - began > limit_s:
            say(f"experiment {experiment.number}: {limit_s:.0f} s are over; call it again to go on")
            return False
        start = clock()
        try:
            figures: Figures = {**experiment.measure(name, small)}
        except RunFailed as error:
            figures = {"miss": str(error)}
        took_s = clock() - start
        say(f"experiment {experiment.number}, {name} ({took_s:.0f} s): {_short(figures)}")
        results.put(name, {**figures, "took_s": round(took_s, 1)})
    return True


def misses(found: Found) -> str:
    """Lines for below a table; empty when every run gave a figure."""
    lines = [f"- {name}: {figures['miss']}" for name, figures in found.items() if "miss" in figures]
    return "\n\nMissing:\n\n" + "\n".join(lines) if lines else ""


def have(found: Found) -> dict[str, Figures]:
    """Those that gave figures."""
    return {name: figures for name, figures in found.items() if "miss" not in figures}


def _short(figures: Figures) -> str:
    text = json.dumps(figures)
    return text if len(text) <= 200 else text[:197] + "..."
