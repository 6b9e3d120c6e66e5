"""Figures from the step times that workers write."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from worker.loop.step_times import COLUMNS

Seconds = npt.NDArray[np.float64]


class TooShort(Exception):
    """A run had too few steps to say how fast it was."""


@dataclass(frozen=True)
class Steps:
    """The steps of one worker: of each column of the file, ``[steps]`` seconds."""

    columns: Mapping[str, Seconds]

    @property
    def starts(self) -> Seconds:
        """When each step began, on a clock that all processes of the host share."""
        return self.columns["start_s"]

    @property
    def ends(self) -> Seconds:
        """When each step ended, on the same clock."""
        ends: Seconds = np.sum([self.columns[name] for name in COLUMNS], axis=0)
        return ends

    def exchanges(self) -> Seconds:
        """``[steps, 2]``: from when to when each step's push and pull were under way."""
        begin = self.starts + self.columns["data_s"] + self.columns["compute_s"]
        return np.stack([begin, begin + self.columns["push_pull_s"]], axis=1)


def read_steps(folder: Path) -> list[Steps]:
    """Steps that the workers of a run wrote to ``folder``."""
    workers = []
    for path in sorted(folder.glob("*.csv")):
        with path.open() as file:
            _, *rows = csv.reader(file)
        table = np.array(rows, np.float64).reshape(len(rows), len(COLUMNS))
        workers.append(Steps(dict(zip(COLUMNS, table.T, strict=True))))
    return workers


def step_ms(workers: Sequence[Steps], warmup: int) -> float:
    """Median over all steps of all workers after their first ``warmup``, from the start of a step
    to the start of the next: what the worker does between steps counts too. Milliseconds.

    Raises:
        TooShort: not one such step.
    """
    gaps = np.concatenate([np.diff(worker.starts[warmup:]) for worker in workers])
    if not gaps.size:
        raise TooShort(f"no worker made more than {warmup + 1} steps")
    return float(np.median(gaps)) * 1e3


def parts_ms(workers: Sequence[Steps], warmup: int) -> dict[str, float]:
    """The median of each part of a step, in milliseconds."""
    return {
        name.removesuffix("_s"): round(
            float(np.median(np.concatenate([w.columns[name][warmup:] for w in workers]))) * 1e3, 4
        )
        for name in COLUMNS[1:]
    }


def steps_per_s(workers: Sequence[Steps], warmup: int, least_s: float) -> float:
    """Steps per second of all workers together, while all of them were at work: from the moment
    when the last one had ``warmup`` steps behind it until the first one began its last step.

    Raises:
        TooShort: that was less than ``least_s`` seconds.
    """
    made = [len(worker.starts) for worker in workers]
    if min(made, default=0) <= warmup:
        raise TooShort(f"the workers made {made} steps; expected more than {warmup} of each")
    begin = max(worker.starts[warmup] for worker in workers)
    end = min(worker.starts[-1] for worker in workers)
    if end - begin < least_s:
        raise TooShort(f"all were at work for {end - begin:.1f} s; expected {least_s:g} s")
    count = sum(int(((w.starts >= begin) & (w.starts < end)).sum()) for w in workers)
    return count / float(end - begin)
