"""Ours beside the peers', alternately, in one go: ``make bench`` or ``python -m benchmarks.bench``.

Every figure of ours comes from the commands a user types; every figure of a peer from its script,
run as it stands. A peer whose script or package is absent is shown as a miss.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path

from benchmarks import floor, modes
from benchmarks.cluster import ROOT, Cluster, RunFailed
from benchmarks.peers import Figure, run_peer
from benchmarks.report import add_arguments, say, write_json, write_section
from benchmarks.steps import TooShort, parts_ms, step_ms, steps_per_s
from benchmarks.table import NAMES, Results, Sample, tables
from benchmarks.workloads import CASES, DENSE, WARMUP, Case, Transport

LEAST_S = 5.0
"""A rate over less than this says little."""


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    cases = [case for case in CASES if not options.only or case.name in options.only]
    rows = [row for row in modes.ROWS if not options.only or row.name in options.only]
    samples: list[Sample] = []
    measured: list[modes.Measured] = []
    try:
        for run in range(1, options.runs + 1):
            for case in cases:
                for sample in measure(run, case, options.peers):
                    say(_line(sample, options.runs))
                    samples.append(sample)
            for row in rows:
                for one in modes.measure_row(run, row, options.peers):
                    who, found = modes.NAMES[one.system], _found(one.figure)
                    say(f"run {run} of {options.runs}: {row.name}, {who}: {found}")
                    measured.append(one)
    finally:
        # A benchmark that is cut short has still measured something.
        text, of_modes = tables(Results(samples), cases), modes.table(measured, rows)
        sys.stdout.write(f"{text}\n{of_modes}")
        if options.json:
            document = {"samples": list(map(asdict, samples)), "modes": list(map(asdict, measured))}
            write_json(options.json, document)
    if options.readme:
        write_section("bench", text)
        write_section("modes", of_modes)


def measure(run: int, case: Case, peers: Path) -> Iterator[Sample]:
    """Everybody's figure for one case, ours and theirs in turn."""
    for transport, peer in zip_longest(case.transports, case.peers):
        if transport:
            yield run_ours(run, case, transport)
        if peer:
            yield Sample(run, case.name, peer, run_peer(peers, peer, case.name))
    if case.workload in DENSE:
        nbytes = DENSE[case.workload].nbytes
        yield Sample(run, case.name, "memcpy", Figure(floor.memcpy_ms(nbytes)))
        yield Sample(run, case.name, "loopback", Figure(floor.loopback_ms(nbytes)))


def run_ours(run: int, case: Case, transport: Transport) -> Sample:
    """One run of ours, on one shard."""
    try:
        # Nor do the peers encrypt anything; benchmarks.tls shows what that costs.
        options = ("--insecure",)
        with Cluster(
            case.job, workers=case.workers, transport=transport, options=options
        ) as cluster:
            workers = cluster.wait()
        if case.in_ms:
            figure = Figure(step_ms(workers, WARMUP))
        else:
            rate = steps_per_s(workers, WARMUP, LEAST_S)
            figure = Figure(1e3 / rate, rate)
    except (RunFailed, TooShort) as error:
        return Sample(run, case.name, transport, Figure(miss=str(error)))
    return Sample(run, case.name, transport, figure, parts_ms(workers, WARMUP))


def _line(sample: Sample, runs: int) -> str:
    who = NAMES.get(sample.who, sample.who)
    return f"run {sample.run} of {runs}: {sample.case}, {who}: {_found(sample.figure)}"


def _found(figure: Figure) -> str:
    found = figure.miss or f"{figure.ms:.3g} ms"
    return f"{found}, {figure.steps_per_s:.0f} steps/s" if figure.steps_per_s else found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument(
        "--only",
        action="append",
        choices=[*(case.name for case in CASES), *(row.name for row in modes.ROWS)],
        metavar="CASE",
        help="one of %(choices)s; may be repeated",
    )
    parser.add_argument(
        "--peers",
        type=Path,
        default=ROOT.parent / "shared" / "peers",
        metavar="DIR",
        help="where the peers' scripts are; default: %(default)s",
    )
    add_arguments(parser)
    return parser


if __name__ == "__main__":
    main()
