"""From the figures of several runs to the table of ours beside the peers'."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.peers import PEERS, Figure
from benchmarks.workloads import DENSE, ROWS, TARGETS, Case, Transport

OURS: dict[Transport, str] = {"shm": "shared memory", "tcp": "TCP", "tcp_bf16": "TCP bf16"}

NAMES = dict([*OURS.items(), *PEERS.items()])

MISSING = "–"

_IN_MS = "Milliseconds a step (less is better), medians.\n\n"


@dataclass(frozen=True)
class Sample:
    """One figure of one run.

    Attributes:
        who: ``shm``, ``tcp``, ``tcp_bf16`` are ours; a peer; or the floor, ``memcpy`` and
            ``loopback``.
        parts: ours: the median of each part of a step, milliseconds.
    """

    run: int
    case: str
    who: str
    figure: Figure
    parts: dict[str, float] | None = None


class Results:
    """All samples; ratios are taken within a run, and medians over the runs."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._figures: dict[tuple[str, str], dict[int, Figure]] = {}
        for sample in samples:
            self._figures.setdefault((sample.case, sample.who), {})[sample.run] = sample.figure

    def median(self, case: Case, who: str) -> float | None:
        """Milliseconds, or steps per second where the case is counted so; None when every run of
        it missed, or there was none."""
        figures = self._figures.get((case.name, who), {}).values()
        found = [value for figure in figures if (value := _value(case, figure)) is not None]
        return statistics.median(found) if found else None

    def ratio(self, case: Case, transport: Transport) -> float | None:
        """How many times faster than its peers: shared memory than the best of them, TCP than
        TensorFlow. None where one side is missing in all runs."""
        against = case.peers if transport == "shm" else ("tf",)
        ratios = []
        for run, figure in self._figures.get((case.name, transport), {}).items():
            theirs = [
                value
                for peer in against
                if (found := self._figures.get((case.name, peer), {}).get(run)) is not None
                and (value := found.ms) is not None
            ]
            if theirs and figure.ms is not None:
                ratios.append(min(theirs) / figure.ms)
        return statistics.median(ratios) if ratios else None

    def misses(self) -> list[tuple[str, str, str]]:
        """Case, who and why, of all that gave no figure, each reason once."""
        found = {
            (case, who, figure.miss): None
            for (case, who), runs in self._figures.items()
            for figure in runs.values()
            if figure.miss
        }
        return list(found)


def tables(results: Results, cases: Sequence[Case]) -> str:
    """Markdown: the dense cases, those of embedding tables, the MNIST cases, and what is missing
    and why."""
    dense = [case for case in cases if case.workload in DENSE]
    rows = [case for case in cases if case.workload in ROWS]
    mnist = [case for case in cases if not case.in_ms]
    parts = []
    if dense:
        parts.append(_IN_MS + _dense(results, dense))
    if rows:
        parts.append(_IN_MS + _rows(results, rows))
    if mnist:
        parts.append("Steps per second of all workers, medians.\n\n" + _mnist(results, mnist))
    missing = [f"- {case}, {NAMES.get(who, who)}: {why}" for case, who, why in results.misses()]
    if missing:
        parts.append("Missing:\n\n" + "\n".join(missing))
    return "\n\n".join(parts) + "\n"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None) -> str:
    """Three significant digits, or a dash."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def verdict(ratio: float | None, target: float | None) -> str:
    """A ratio beside its target."""
    if target is None:
        return MISSING if ratio is None else f"{ratio:.2f}×"
    if ratio is None:
        return f"missing (≥ {target:g}×)"
    return f"{ratio:.2f}× (≥ {target:g}×, {'met' if ratio >= target else '**missed**'})"


def _dense(results: Results, cases: Sequence[Case]) -> str:
    peers = cases[0].peers
    header = [
        "workload",
        *OURS.values(),
        *(NAMES[peer] for peer in peers),
        "shared memory ÷ best peer",
        "TCP ÷ TF",
        "TCP bf16 ÷ TF",
        "floor: memcpy",
        "floor: loopback",
    ]
    return markdown(header, [_row(results, case, (*OURS, *peers), _FLOORS) for case in cases])


def _rows(results: Results, cases: Sequence[Case]) -> str:
    peers = ("tf", "torch", "ray")
    header = [
        "workload",
        OURS["shm"],
        OURS["tcp"],
        *(NAMES[peer] for peer in peers),
        "shared memory ÷ best peer",
        "TCP ÷ TF",
    ]
    return markdown(header, [_row(results, case, ("shm", "tcp", *peers), ()) for case in cases])


def _mnist(results: Results, cases: Sequence[Case]) -> str:
    header = ["workload", "shared memory", "TCP", "TF", "shared memory ÷ TF", "TCP ÷ TF"]
    return markdown(header, [_row(results, case, ("shm", "tcp", "tf"), ()) for case in cases])


_FLOORS = ("memcpy", "loopback")


def _row(results: Results, case: Case, whose: Sequence[str], floors: Sequence[str]) -> list[str]:
    targets = TARGETS.get(case.name, {})
    return [
        case.name,
        *(number(results.median(case, who)) for who in whose),
        *(verdict(results.ratio(case, t), targets.get(t)) for t in case.transports),
        *(number(results.median(case, floor)) for floor in floors),
    ]


def _value(case: Case, figure: Figure) -> float | None:
    return figure.ms if case.in_ms else figure.steps_per_s
