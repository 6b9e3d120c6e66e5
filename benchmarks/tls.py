"""Cost of mutual TLS: steps of the dense workloads with certificates and in plaintext, in turn.

python -m benchmarks.tls
python -m benchmarks.tls --only dense_1x64MB --runs 1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.cluster import Cluster, RunFailed
from benchmarks.report import add_arguments, write_json, write_section
from benchmarks.steps import TooShort, step_ms
from benchmarks.table import markdown
from benchmarks.workloads import DENSE, JOBS, Transport

RUNS = 3
WARMUP = 10
TARGET = 0.25
"""The share of its throughput that encryption may cost a push and pull over TCP."""

TRANSPORTS: tuple[Transport, ...] = ("tcp", "shm")


@dataclass(frozen=True)
class TlsSample:
    """The median step of one run, in milliseconds; or why there is none."""

    case: str
    transport: Transport
    encrypted: bool
    run: int
    ms: float | None = None
    miss: str = ""


def measure(run: int, case: str, transport: Transport, encrypted: bool) -> TlsSample:
    """One worker and one shard."""
    options = () if encrypted else ("--insecure",)
    try:
        with Cluster(JOBS / f"{case}.py", transport=transport, options=options) as cluster:
            ms = step_ms(cluster.wait(), WARMUP)
    except (RunFailed, TooShort) as error:
        return TlsSample(case, transport, encrypted, run, miss=str(error))
    return TlsSample(case, transport, encrypted, run, ms)


def table(samples: Sequence[TlsSample]) -> str:
    """Markdown: a row for each case and transport."""
    rows = []
    for case, transport in dict.fromkeys((s.case, s.transport) for s in samples):
        mine = [s for s in samples if (s.case, s.transport) == (case, transport)]
        plain = [s.ms for s in mine if s.ms and not s.encrypted]
        secret = [s.ms for s in mine if s.ms and s.encrypted]
        if not plain or not secret:
            missed = "; ".join(sorted({s.miss for s in mine if s.miss}))
            rows.append([case, transport, "-", "-", missed])
            continue
        times = [f"{median(plain):.1f}", f"{median(secret):.1f}"]
        rows.append([case, transport, *times, f"{lost(plain, secret):.0%}"])
    return markdown(["case", "transport", "plaintext, ms", "mTLS, ms", "throughput lost"], rows)


def lost(plain: Sequence[float], secret: Sequence[float]) -> float:
    """The share of steps per second that is lost, by the medians of steps."""
    return 1 - median(plain) / median(secret)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 if all cases over TCP met the target, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help="default: %(default)s")
    parser.add_argument("--only", action="append", choices=list(DENSE), metavar="CASE")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    samples = []
    for run in range(1, options.runs + 1):
        for case in options.only or DENSE:
            for transport in options.transport or TRANSPORTS:
                for encrypted in (False, True):
                    sample = measure(run, case, transport, encrypted)
                    samples.append(sample)
                    sys.stderr.write(f"{sample}\n")
    text = table(samples)
    sys.stdout.write(text)
    if options.json:
        write_json(options.json, {"samples": [asdict(sample) for sample in samples]})
    if options.readme:
        write_section("tls", text)
    return 0 if met(samples) else 1


def met(samples: Sequence[TlsSample]) -> bool:
    """Whether TLS over TCP costs no more than :data:`TARGET` in any case."""
    for case in {s.case for s in samples if s.transport == "tcp"}:
        mine = [s for s in samples if (s.case, s.transport) == (case, "tcp")]
        plain = [s.ms for s in mine if s.ms and not s.encrypted]
        secret = [s.ms for s in mine if s.ms and s.encrypted]
        if not plain or not secret or lost(plain, secret) > TARGET:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
