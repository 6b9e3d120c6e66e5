"""Cost of a shard's part of an embedding table: rows created a second, look-up, memory a row.

python -m benchmarks.tables                # 20 million rows of 16, on two shards

The table itself, in a process of its own for each shard, without a network.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.memory import MB, parse_kilobytes
from benchmarks.report import add_arguments, say, write_json, write_section
from benchmarks.table import markdown
from pserver.tables.table import Table
from psrpc.core.tables import Ids, Rows, TableSpec, shard_of

OPTIMIZERS = {"SGD": 0, "RowwiseAdagrad": 1, "Adagrad": 16, "Adam": 32}
"""Each with the float32 elements that it keeps beside a row of 16."""

WIDTH = 16
BATCH = 65_536
LOOKS = 50

LEAST_ROWS_PER_S = 1e6
MOST_LOOK_UP_MS = 5.0
MOST_OVER, FIXED_NBYTES = 1.3, 32


@dataclass(frozen=True)
class TableSample:
    """Result of one shard.

    Attributes:
        rows: on this shard.
        rows_per_s: created by updates, each of up to 65,536 new ids: median over the updates.
        whole_rows_per_s: over all updates, in which the table also grows.
        longest_ms: of the longest update, during which the shard answers no call.
        look_up_ms: to read 65,536 rows that there are, of ids drawn uniformly; median.
        zipf_ms: to read the rows of 65,536 ids that were drawn by Zipf's law, once each; median.
        zipf_rows: how many these are.
        nbytes: memory of the process that came with the table (RSS).
    """

    optimizer: str
    rows: int
    rows_per_s: float
    whole_rows_per_s: float
    longest_ms: float
    look_up_ms: float
    zipf_ms: float
    zipf_rows: int
    nbytes: int

    @property
    def row_nbytes(self) -> float:
        """Memory of one row."""
        return self.nbytes / self.rows

    @property
    def bound_nbytes(self) -> float:
        """The most that is wanted: 1.3 times values and slots, and 32 bytes."""
        return MOST_OVER * 4 * (WIDTH + OPTIMIZERS[self.optimizer]) + FIXED_NBYTES


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    samples: list[TableSample] = []
    try:
        for optimizer in options.optimizer or ["SGD", "Adam"]:
            for shards in sorted({1, options.shards}):
                samples += measure(optimizer, shards, options.rows if shards > 1 else options.alone)
                for sample in samples[-shards:]:
                    say(_line(sample))
    finally:
        text = table_of(samples)
        sys.stdout.write(text)
        if options.json:
            write_json(options.json, {"samples": [asdict(sample) for sample in samples]})
    if options.readme:
        write_section("tables", text)


def measure(optimizer: str, shards: int, rows: int) -> list[TableSample]:
    """All shards at once, of a table of ``rows`` rows."""
    # Fresh processes: memory that was used before would hide what the table takes.
    with ProcessPoolExecutor(shards, get_context("spawn")) as processes:
        parts = [
            processes.submit(measure_shard, optimizer, shard, shards, rows // shards)
            for shard in range(shards)
        ]
        return [part.result() for part in parts]


def measure_shard(optimizer: str, shard: int, shards: int, rows: int) -> TableSample:
    """Fills the part of ``shard`` with ``rows`` rows and looks some up."""
    spec = TableSpec(
        name="rows",
        width=WIDTH,
        vocabulary=None,
        initializer={"class_name": "uniform", "config": {"low": -0.05, "high": 0.05}},
        optimizer={"class_name": optimizer, "config": {"learning_rate": 0.01}},
    )
    table = Table(spec, shard, shards)
    gradients = np.full((BATCH, WIDTH), 1e-3, np.float32)
    into = np.zeros_like(gradients)
    batches = -(-rows // BATCH)
    before = _rss()
    took, longest_s = [], 0.0
    for batch in range(batches):
        ids = new_ids(batch, shard, shards)[: rows - len(table)]
        begin = time.perf_counter()
        update = Rows(ids, gradients[: len(ids)])
        table.check(update)
        table.apply(update, 1.0, batch, batch + 1)
        took_s = time.perf_counter() - begin
        took.append(took_s / len(ids))
        longest_s = max(longest_s, took_s)
    nbytes = _rss() - before
    uniform, zipf = (known_ids(zipf, rows, shard, shards) for zipf in (False, True))
    assert table.present(uniform).all()
    assert table.present(zipf).all()
    return TableSample(
        optimizer,
        len(table),
        1 / statistics.median(took),
        1 / statistics.mean(took),
        longest_s * 1e3,
        _look_up_ms(table, uniform, into),
        _look_up_ms(table, zipf, into),
        len(zipf),
        nbytes,
    )


def new_ids(batch: int, shard: int, shards: int) -> Ids:
    """Up to 65,536 ids of the shard, ascending, that no other batch has: as good as certainly, of
    2^63."""
    random = np.random.default_rng((batch, shard))
    # Some more than are needed, since some are of other shards.
    ids = random.integers(0, 1 << 63, int(BATCH * shards * 1.05) if shards > 1 else BATCH)
    return np.unique(ids[shard_of(ids, shards) == shard][:BATCH])


def known_ids(zipf: bool, rows: int, shard: int, shards: int) -> Ids:
    """Ids, ascending, of those that the first batches had. Uniformly drawn ones are 65,536
    different ones; by Zipf's law the ids that came first are the most frequent ones."""
    whole = max(1, rows // BATCH)
    if zipf:
        draws = np.random.default_rng(0).random(BATCH)
        ranks = np.unique(np.exp(draws * np.log(whole * BATCH)).astype(np.int64) - 1)
        places = [ranks[ranks // BATCH == batch] % BATCH for batch in range(whole)]
    else:
        places = [np.arange(batch, BATCH, whole) for batch in range(whole)]
    parts = [
        ids[at[at < len(ids)]]
        for batch, at in enumerate(places)
        for ids in [new_ids(batch, shard, shards)]
    ]
    return np.unique(np.concatenate(parts)[:BATCH])


def table_of(samples: Sequence[TableSample]) -> str:
    """Markdown."""
    header = [
        "optimizer, rows on this shard",
        f"new rows/s (≥ {LEAST_ROWS_PER_S / 1e6:g} M)",
        "over all updates",
        "longest update",
        f"65,536 rows (≤ {MOST_LOOK_UP_MS:g} ms)",
        "by Zipf's law",
        "bytes a row",
        "RSS",
    ]
    return markdown(header, [_cells(sample) for sample in samples]) + "\n"


def _cells(sample: TableSample) -> list[str]:
    return [
        f"{sample.optimizer}, {sample.rows / 1e6:.1f} M",
        f"{sample.rows_per_s / 1e6:.2f} M ({_judged(sample.rows_per_s >= LEAST_ROWS_PER_S)})",
        f"{sample.whole_rows_per_s / 1e6:.2f} M",
        f"{sample.longest_ms:.0f} ms",
        f"{sample.look_up_ms:.1f} ms ({_judged(sample.look_up_ms <= MOST_LOOK_UP_MS)})",
        f"{sample.zipf_ms:.1f} ms ({sample.zipf_rows:,} ids)",
        f"{sample.row_nbytes:.0f} (≤ {sample.bound_nbytes:.0f}, "
        f"{_judged(sample.row_nbytes <= sample.bound_nbytes)})",
        f"{sample.nbytes / MB:.0f} MB",
    ]


def _judged(good: bool) -> str:
    return "met" if good else "**missed**"


def _line(sample: TableSample) -> str:
    return " | ".join(_cells(sample))


def _look_up_ms(table: Table, ids: Ids, into: npt.NDArray[np.float32]) -> float:
    took = []
    for _ in range(LOOKS):
        begin = time.perf_counter()
        table.read(ids, into[: len(ids)])
        took.append(time.perf_counter() - begin)
    return statistics.median(took) * 1e3


def _rss() -> int:
    return parse_kilobytes(Path("/proc/self/status").read_text())["VmRSS"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--shards", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument(
        "--rows", type=int, default=20_000_000, metavar="N", help="over all; default: 20000000"
    )
    parser.add_argument(
        "--alone",
        type=int,
        default=2_000_000,
        metavar="N",
        help="of one shard that has the machine to itself; default: 2000000",
    )
    parser.add_argument(
        "--optimizer", action="append", choices=list(OPTIMIZERS), help="default: SGD and Adam"
    )
    add_arguments(parser)
    return parser


if __name__ == "__main__":
    main()
