"""Plain pictures of figures, PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 8.0, 4.0, 110

Series = Mapping[str, Sequence[float]]
"""By name: one number for each label."""


def bars(
    path: Path,
    labels: Sequence[str],
    series: Series,
    *,
    ylabel: str,
    title: str,
    spread: Series | None = None,
    line: tuple[float, str] | None = None,
) -> None:
    """Groups of bars.

    Args:
        series: the bars of each group, from left to right; NaN leaves one out.
        spread: of the same shape: half of an error bar's length.
        line: a height that is marked across, and what it means.
    """
    figure, axes = _new()
    width = 0.8 / max(1, len(series))
    for index, (name, values) in enumerate(series.items()):
        places = [at + (index - (len(series) - 1) / 2) * width for at in range(len(labels))]
        error = None if spread is None else list(spread[name])
        axes.bar(places, values, width, label=name, yerr=error, capsize=2)
    if line is not None:
        axes.axhline(line[0], color="black", linestyle="--", linewidth=1, label=line[1])
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)
    axes.set_ylabel(ylabel)
    axes.set_title(title)
    # Beside the bars: there is no corner that none of them reaches.
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _write(figure, path)


def lines(
    path: Path,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    xlabel: str,
    ylabel: str,
    title: str,
    log_x: bool = False,
    ylim: tuple[float, float] | None = None,
) -> None:
    """Curves: x and y of each name."""
    figure, axes = _new()
    for name, (x, y) in series.items():
        axes.plot(x, y, marker="o", markersize=3, label=name)
    if log_x:
        axes.set_xscale("log", base=2)
    if ylim is not None:
        axes.set_ylim(*ylim)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    _write(figure, path)


def histograms(path: Path, counts: Mapping[str, Sequence[float]], *, title: str) -> None:
    """One small histogram for each name: how many gradients had staleness 0, 1, …, up to the
    largest that one gradient in a thousand of any of them had."""
    plt = _pyplot()
    columns = 4
    rows = max(1, -(-len(counts) // columns))
    figure, grid = plt.subplots(
        rows, columns, figsize=(WIDTH_INCHES, 1.7 * rows), squeeze=False, sharex=True
    )
    cells = list(grid.flat)
    largest = max(
        (at for v in counts.values() for at, n in enumerate(v) if n > sum(v) / 1000), default=0
    )
    for axes, (name, values) in zip(cells, counts.items(), strict=False):
        total = sum(values) or 1
        axes.bar(range(len(values)), [value / total for value in values], width=0.9)
        axes.set_title(name, fontsize=7)
        axes.tick_params(labelsize=6)
        axes.set_xlim(-0.6, largest + 0.6)
        axes.set_ylim(0, 1)
    for axes in cells[len(counts) :]:
        axes.axis("off")
    figure.suptitle(title, fontsize=9)
    _write(figure, path)


def _new() -> tuple[Any, Any]:
    figure, axes = _pyplot().subplots(figsize=(WIDTH_INCHES, HEIGHT_INCHES))
    return figure, axes


def _pyplot() -> Any:
    import matplotlib as mpl

    # No window, also where there is a screen.
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _write(figure: Any, path: Path) -> None:
    figure.tight_layout()
    # Without the version of matplotlib, so that the same figures are the same file.
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})
    _pyplot().close(figure)
