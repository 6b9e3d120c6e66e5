"""Measures what the consistency policies do: tables and plots for docs/consistency.md.

    python -m benchmarks.consistency --only 1 2 3 4 5 --docs

Every figure goes into a file of benchmarks/results as soon as it is there, and what is there is not
measured again. So a run may be cut short: the same command goes on, and without anything left to
run it makes tables and plots anew. The experiments:

    1  one of four workers is five times slower: examples per second (about 8 minutes)
    2  mnist_cnn under every policy: time and steps to 97 % (about 25 minutes; three calls)
    3  gradients that are 8 and 16 updates old (about 10 minutes)
    4  mnist_dnn at a learning rate that plain async does not survive (about 8 minutes)
    5  batches of 64 to 4096, with and without the recipe for large ones (about 9 minutes)

Let the machine do nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import (
    consistency_accuracy,
    consistency_batches,
    consistency_divergence,
    consistency_staleness,
    consistency_stragglers,
)
from benchmarks.cluster import ROOT
from benchmarks.experiment import Experiment, Results, left, run
from benchmarks.report import say, write_section

PAGE = ROOT / "docs" / "consistency.md"
FIGURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmarks" / "results"

EXPERIMENTS: tuple[Experiment, ...] = (
    consistency_stragglers.EXPERIMENT,
    consistency_accuracy.EXPERIMENT,
    consistency_staleness.EXPERIMENT,
    consistency_divergence.EXPERIMENT,
    consistency_batches.EXPERIMENT,
)

LIMIT_S = 540.0


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 3 when the time was over before all was run."""
    options = parser().parse_args(argv)
    if options.small and options.docs:
        parser().error("--small figures mean nothing, so they do not go into the page")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if options.small else RESULTS
        finished = [_one(e, folder, options) for e in EXPERIMENTS if e.number in options.only]
    return 0 if all(finished) else 3


def _one(experiment: Experiment, folder: Path, options: argparse.Namespace) -> bool:
    results = Results(folder / f"consistency-{experiment.number}.json")
    names = list(left(experiment.names(options.small), results.found, options.run, options.again))
    try:
        return run(experiment, results, names, options.small, options.limit)
    finally:
        # What was cut short has still measured something.
        table = experiment.table(results.found)
        sys.stdout.write(f"{experiment.number}. {experiment.title}\n\n{table}\n\n")
        _show(experiment, results, table, folder if options.small else FIGURES, options.docs)


def _show(experiment: Experiment, results: Results, table: str, figures: Path, docs: bool) -> None:
    try:
        import matplotlib as _  # noqa: F401  # only plots need it
    except ImportError:
        say("no plots: pip install matplotlib, or the project's extra 'bench'")
    else:
        figures.mkdir(parents=True, exist_ok=True)
        experiment.plot(results.found, figures / f"consistency-{experiment.number}.png")
    if docs:
        write_section(experiment.section, table, PAGE)


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.consistency",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    numbers = [experiment.number for experiment in EXPERIMENTS]
    parser.add_argument(
        "--only",
        type=int,
        nargs="+",
        choices=numbers,
        default=numbers,
        metavar="N",
        help="experiments; default: all",
    )
    parser.add_argument(
        "--run",
        action="append",
        default=[],
        metavar="PART",
        help="only runs with PART in their name; may be repeated",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help="begin no run of an experiment after so many seconds; default: %(default)s",
    )
    parser.add_argument("--again", action="store_true", help="measure also what is there")
    parser.add_argument("--small", action="store_true", help="try the script: minutes in all")
    parser.add_argument("--docs", action="store_true", help="put the tables into the page")
    return parser


if __name__ == "__main__":
    sys.exit(main())
