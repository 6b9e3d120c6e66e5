"""Savings and costs of rounded and compressed tensors on ``examples/mnist_dnn.py``: bytes, time and
accuracy, for docs/compression.md.

    python -m benchmarks.compression --json FILE --docs

Every figure of time and accuracy comes from ``coordinator up`` with 2 shards and 3 workers over
TCP. With ``--json`` figures that the file holds are not measured again, so that a run that was cut
short goes on, and ``--part time --again`` takes the times alone anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.cluster import ROOT, Cluster, RunFailed
from benchmarks.payload import Payload, measure_payload
from benchmarks.report import say, write_json, write_section
from benchmarks.steps import Steps, TooShort, step_ms
from benchmarks.table import MISSING, markdown, number
from benchmarks.workloads import WARMUP
from psrpc.files.run_paths import read_summary

JOB = ROOT / "examples" / "mnist_dnn.py"
PAGE = ROOT / "docs" / "compression.md"

SHARDS, WORKERS = 2, 3

Part = Literal["time", "accuracy"]
PARTS: tuple[Part, ...] = ("time", "accuracy")

Key = tuple[Part, str, str, int, int]
"""Part, mode, row, run and epochs of a sample."""

VARIANTS: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("wire_dtype=bfloat16",),
    "float16": ("wire_dtype=float16",),
    "int8": ("compression=int8",),
    "topk-0.1": ("compression=topk", "topk=0.1"),
    "topk-0.01": ("compression=topk", "topk=0.01"),
    "bfloat16+int8": ("wire_dtype=bfloat16", "compression=int8"),
}
"""The rows: a name and the settings of the job. The first is what the others are compared with."""

MODES: dict[str, tuple[str, ...]] = {
    "sync": ("mode=sync", "replicas=3"),
    "async": ("mode=async", "optimizer.learning_rate=0.003"),
}
"""The tables: each mode with the learning rate of docs/reproductions.md."""

TIMED_EPOCHS, EPOCHS = 2, 15
"""Of runs whose time is taken, and of those trained to the end."""

LIMIT_S = 3600.0
GIGABIT_PER_MS = 1e6
"""What a link of 1 Gbit/s carries in a millisecond, bits."""


@dataclass(frozen=True)
class Sample:
    """One run of one row of one table.

    Attributes:
        run: for the time which turn it was, for the accuracy the seed of the job.
        step_ms: median from the start of a step to the start of the next.
        compute_ms: median, compression included.
        exchange_ms: median of gradient up and parameters down.
        accuracy: on the test data, after the last epoch.
        miss: why there is no figure; empty if there is one.
    """

    part: Part
    mode: str
    variant: str
    run: int
    epochs: int
    step_ms: float | None = None
    compute_ms: float | None = None
    exchange_ms: float | None = None
    accuracy: float | None = None
    miss: str = ""

    @property
    def key(self) -> Key:
        """Identifies the run."""
        return (self.part, self.mode, self.variant, self.run, self.epochs)


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    samples = {sample.key: sample for sample in read_samples(options.json)}
    try:
        for planned in plan_runs(options, () if options.again else list(samples)):
            sample = run(planned)
            say(str(sample))
            samples[sample.key] = sample
            if options.json:
                write_json(options.json, {"samples": [asdict(s) for s in samples.values()]})
    finally:
        # A benchmark that is cut short has still measured something.
        payloads = {name: measure_payload(JOB, SHARDS, sets) for name, sets in VARIANTS.items()}
        texts = tables(samples.values(), payloads, options.epochs)
        sys.stdout.write("\n".join(f"{mode}\n\n{text}" for mode, text in texts.items()))
    if options.docs:
        for mode, text in texts.items():
            write_section(mode, text, PAGE)


def plan_runs(options: argparse.Namespace, known: Container[Key]) -> Iterator[Sample]:
    """Samples without figures, for the runs that are missing. Turn by turn, so that a slow
    minute does not fall on one row."""
    for part, turns in zip(PARTS, (options.runs, options.seeds), strict=True):
        epochs = TIMED_EPOCHS if part == "time" else options.epochs
        for turn, mode, variant in product(
            range(turns), options.mode or MODES, options.only or VARIANTS
        ):
            planned = Sample(part, mode, variant, turn, epochs)
            if part in (options.part or PARTS) and planned.key not in known:
                yield planned


def run(planned: Sample) -> Sample:
    """``planned`` with the figures of its part."""
    settings = [*MODES[planned.mode], *VARIANTS[planned.variant], f"epochs={planned.epochs}"]
    if planned.part == "accuracy":
        settings.append(f"seed={planned.run}")
    try:
        with Cluster(
            JOB, shards=SHARDS, workers=WORKERS, transport="tcp", settings=settings
        ) as cluster:
            workers = cluster.wait(LIMIT_S)
            accuracy: float = read_summary(cluster.run_dir)["eval"]["accuracy"]
        if planned.part == "accuracy":
            return replace(planned, accuracy=accuracy)
        return replace(planned, **times_ms(workers))
    except (RunFailed, TooShort) as error:
        return replace(planned, miss=str(error))


def times_ms(workers: Sequence[Steps]) -> dict[str, Any]:
    """The medians of a run, in milliseconds.

    Raises:
        TooShort: the workers made hardly a step.
    """

    def median(*parts: str) -> float:
        spent = [sum(w.columns[f"{part}_s"][WARMUP:] for part in parts) for w in workers]
        return float(np.median(np.concatenate(spent))) * 1e3

    return {
        "step_ms": step_ms(workers, WARMUP),
        "compute_ms": median("compute"),
        # Of the three an async step has the first and a sync step the others.
        "exchange_ms": median("push_pull", "push", "pull"),
    }


def read_samples(path: Path | None) -> list[Sample]:
    """Samples of an earlier run; none where there is no such file."""
    if path is None or not path.exists():
        return []
    return [Sample(**sample) for sample in json.loads(path.read_text())["samples"]]


def tables(
    samples: Iterable[Sample], payloads: Mapping[str, Payload], epochs: int
) -> dict[str, str]:
    """By mode, markdown; accuracies are those after ``epochs`` epochs."""
    samples = [s for s in samples if s.part == "time" or s.epochs == epochs]
    found = {}
    for mode in MODES:
        rows = []
        for variant in VARIANTS:
            mine = [s for s in samples if (s.mode, s.variant) == (mode, variant)]
            rows.append(_row(variant, payloads[variant], payloads["float32"], mine))
        missing = dict.fromkeys(
            f"- {s.variant}, {s.part}: {s.miss}" for s in samples if s.miss and s.mode == mode
        )
        lines = [markdown(_HEADER, rows), *(["", "Missing:", ""] if missing else []), *missing]
        found[mode] = "\n".join(lines) + "\n"
    return found


_HEADER = (
    "on the wire",
    "gradient, kB",
    "parameters, kB",
    "of float32",
    "link of 1 Gbit/s, ms",
    "compute, ms",
    "exchange, ms",
    "step, ms",
    "test accuracy",
)


def _row(
    variant: str, payload: Payload, plain: Payload, samples: Sequence[Sample]
) -> tuple[str, ...]:
    return (
        variant,
        f"{payload.push_nbytes / 1e3:.1f}",
        f"{payload.pull_nbytes / 1e3:.1f}",
        f"{payload.nbytes / plain.nbytes:.0%}",
        number(8 * payload.nbytes / GIGABIT_PER_MS),
        number(_median(s.compute_ms for s in samples)),
        number(_median(s.exchange_ms for s in samples)),
        number(_median(s.step_ms for s in samples)),
        _accuracies([s.accuracy for s in samples if s.accuracy is not None]),
    )


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _accuracies(found: Sequence[float]) -> str:
    """The one there is, or the mean and all of them."""
    each = [f"{accuracy:.4f}" for accuracy in found]
    if len(each) < 2:
        return each[0] if each else MISSING
    return f"{statistics.mean(found):.4f} ({', '.join(each)})"


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compression",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="only this")
    parser.add_argument("--mode", action="append", choices=list(MODES), help="only this")
    parser.add_argument(
        "--only", action="append", choices=list(VARIANTS), metavar="ROW", help="one of %(choices)s"
    )
    parser.add_argument(
        "--runs", type=int, default=3, metavar="N", help="whose time is taken; default: 3"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="trained to the end; default: 1"
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=EPOCHS,
        metavar="N",
        help="of those trained to the end; default: %(default)s",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="every raw figure; read first if it is there"
    )
    parser.add_argument("--again", action="store_true", help="measure what FILE holds, too")
    parser.add_argument("--docs", action="store_true", help="put the tables into the page")
    return parser


if __name__ == "__main__":
    main()
