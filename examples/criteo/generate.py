"""Writes made-up clicks as a file of Criteo's format, and says how well they can be predicted.

python -m examples.criteo.generate --rows 100000 --to clicks.tsv
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from .records import Records
from .truth import Floats, Truth, auc
from .tsv import lines

_BLOCK = 10_000


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    stop = options.first + options.rows
    labels, probabilities = [], []
    with options.to.open("w") if options.to else nullcontext() as file:
        for records, probability in _blocks(Truth(options.seed), options.first, stop):
            labels.append(records.labels)
            probabilities.append(probability)
            if file is not None:
                file.writelines(lines(records))
    clicks, exact = np.concatenate(labels), np.concatenate(probabilities)
    sys.stdout.write(
        f"records {options.first} to {stop - 1} of seed {options.seed}: {clicks.mean():.1%} "
        f"clicks; AUC of the true probabilities {auc(exact, clicks):.4f}\n"
    )


def _blocks(truth: Truth, start: int, stop: int) -> Iterator[tuple[Records, Floats]]:
    for first in range(start, stop, _BLOCK):
        yield truth.records(first, min(first + _BLOCK, stop))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.criteo.generate", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, metavar="N", help="default: 100000")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--to", type=Path, metavar="FILE", help="default: no file, the AUC alone")
    return parser


if __name__ == "__main__":
    main()
