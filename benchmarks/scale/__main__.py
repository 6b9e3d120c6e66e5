"""``python -m benchmarks.scale``: how far one coordinator, and one machine, carry.

    python -m benchmarks.scale coordinator     # alone, with simulated members: six minutes
    python -m benchmarks.scale cluster         # with real shards, and workers that sleep: four

Needs two cores that do nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.cluster import RunFailed
from benchmarks.report import write_json
from benchmarks.scale.alone import BATCH_S, FLAT_FROM, FLAT_TO, measure_alone
from benchmarks.scale.sleepers import STEPS_S, sleepers_table, sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints tables; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("coordinator", "cluster"))
    parser.add_argument("--workers", type=int, help="default: 1000, and 64 in a cluster")
    parser.add_argument("--shards", type=int, help="default: 100, and 4 in a cluster")
    parser.add_argument(
        "--batch-s",
        type=lambda text: tuple(map(float, text.split(","))),
        metavar="S,S",
        help="seconds of a batch; default: from slow workers to too fast ones",
    )
    parser.add_argument(
        "--batches",
        type=lambda text: tuple(map(int, text.split(","))),
        default=(FLAT_FROM, FLAT_TO),
        metavar="N,N",
        help="coordinator: when to look at its memory (default: 100000,1000000)",
    )
    parser.add_argument("--no-restart", action="store_true", help="coordinator: without a restart")
    parser.add_argument("--modes", default="async,sync", help="cluster; default: %(default)s")
    parser.add_argument("--processes", type=int, default=2, help="cluster: that workers share")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    asked = parser.parse_args(arguments)
    try:
        text, plain = _coordinator(asked) if asked.what == "coordinator" else _cluster(asked)
    except RunFailed as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(text)
    if asked.json:
        write_json(asked.json, plain)
    return 0


def _coordinator(asked: argparse.Namespace) -> tuple[str, dict[str, object]]:
    return asyncio.run(
        measure_alone(
            asked.workers or 1000,
            asked.shards or 100,
            asked.batch_s or BATCH_S,
            asked.batches,
            not asked.no_restart,
        )
    )


def _cluster(asked: argparse.Namespace) -> tuple[str, dict[str, object]]:
    found = list(
        sweep(
            asked.modes.split(","),
            asked.batch_s or STEPS_S,
            asked.workers or 64,
            asked.shards or 4,
            asked.processes,
        )
    )
    return sleepers_table(found), {"cluster": [asdict(one) for one in found]}


if __name__ == "__main__":
    sys.exit(main())
