"""Time per step against everything it may depend on, the memory of shards, and answers under load:
``make bench-sweep`` or ``python -m benchmarks.sweep``. Takes more than an hour, ``--only`` less.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks import answers, scaling, shard_memory
from benchmarks.report import add_arguments, say, write_json, write_section

Section = tuple[Callable[[], Iterable[Any]], Callable[[list[Any]], str]]
"""What measures, sample by sample, and what makes a table of the samples."""


def sections(runs: int) -> dict[str, Section]:
    """All parts of the sweep, in order."""
    times: dict[str, Section] = {
        name: (partial(scaling.measure, name, runs), scaling.table) for name in scaling.TITLES
    }
    return {
        **times,
        "memory": (shard_memory.measure, shard_memory.table),
        "answers": (answers.measure, answers.table),
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    raw: dict[str, list[dict[str, Any]]] = {}
    try:
        for name, (measure, table) in sections(options.runs).items():
            if options.only and name not in options.only:
                continue
            samples = []
            raw[name] = []
            for sample in measure():
                say(f"{name}: {sample}")
                samples.append(sample)
                raw[name].append(asdict(sample))
            text = table(samples)
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            if options.readme:
                write_section(name, text)
    finally:
        # A benchmark that is cut short has still measured something.
        if options.json:
            write_json(options.json, raw)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__)
    parser.add_argument(
        "--runs",
        type=int,
        default=3,
        metavar="N",
        help="of every point whose time is taken; default: 3",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=list(sections(1)),
        metavar="SECTION",
        help="one of %(choices)s; may be repeated",
    )
    add_arguments(parser)
    return parser


if __name__ == "__main__":
    main()
