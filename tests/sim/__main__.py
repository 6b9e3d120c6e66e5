"""``python -m tests.sim``: simulates clusters with faults, seed after seed."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from tests.sim.faults import PLANNED, RATES
from tests.sim.run import Verdict, run_attended, run_hosted, run_seed, run_summed, silence

PROGRESS_S = 5.0
CHUNK = 8
"""Seeds that are handed to a process at once."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 when a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, metavar="N", help="run one seed, twice")
    which.add_argument("--seeds", type=_range, metavar="A..B", help="run seeds A to B - 1")
    parser.add_argument("--trace", action="store_true", help="show all that happens")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="processes")
    parser.add_argument(
        "--keep-going", action="store_true", help="do not stop at the first seed that fails"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--attended", action="store_true", help="each job has an attendant")
    kind.add_argument("--allreduce", action="store_true", help="workers host the shards")
    kind.add_argument("--sums", action="store_true", help="workers sum gradients of a round")
    options = parser.parse_args(arguments)
    silence()
    run: Callable[..., Verdict] = run_attended if options.attended else run_seed
    if options.allreduce:
        run = run_hosted
    if options.sums:
        run = run_summed
    if options.seed is not None:
        return _one(run, options.seed, options.trace)
    return _many(run, options.seeds, options.jobs, options.keep_going)


def _range(text: str) -> range:
    first, _, last = text.partition("..")
    return range(int(first), int(last))


def _one(run: Callable[..., Verdict], seed: int, trace: bool) -> int:
    verdict = run(seed, _say if trace else None)
    _say(f"seed {seed}: {verdict.options}")
    _say(
        f"{verdict.events} events in {verdict.simulated_s:.1f} simulated seconds; faults: "
        f"{_listed(verdict.fired)}; {_listed(verdict.counts)}; digest {verdict.digest:08x}"
    )
    if verdict.failure:
        _say(verdict)
    again = run(seed)
    if again.digest != verdict.digest:
        _say(f"seed {seed} is not the same twice: {again.digest:08x} the second time")
        return 1
    return 1 if verdict.failure else 0


def _many(run: Callable[..., Verdict], seeds: range, jobs: int, keep_going: bool) -> int:
    began = said = time.monotonic()
    fired: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    failed: list[int] = []
    done, simulated_s, events, cpu_s = 0, 0.0, 0, 0.0
    for verdict in _verdicts(run, seeds, jobs):
        done += 1
        fired += verdict.fired
        counts += verdict.counts
        refused += verdict.refused
        simulated_s += verdict.simulated_s
        events += verdict.events
        cpu_s += verdict.cpu_s
        if verdict.failure:
            failed.append(verdict.seed)
            _say(verdict)
            if not keep_going:
                break
        now = time.monotonic()
        if now - said >= PROGRESS_S:
            said = now
            sys.stderr.write(f"{done} of {len(seeds)} seeds, {len(failed)} failed\n")
    spent = time.monotonic() - began
    _say(
        f"{done} seeds in {spent:.1f} s ({1000 * cpu_s / max(1, done):.1f} ms of CPU each), "
        f"{simulated_s:.0f} simulated seconds, {events} events; failed: "
        f"{', '.join(map(str, failed)) or 'none'}\n"
        f"faults: {_listed({kind: fired[kind] for kind in (*RATES, *PLANNED)} | fired)}\n"
        f"led to: {_listed(counts)}\n"
        f"answered by errors: {_listed(refused)}"
    )
    return 1 if failed else 0


def _verdicts(run: Callable[..., Verdict], seeds: Iterable[int], jobs: int) -> Iterator[Verdict]:
    if jobs == 1:
        yield from map(run, seeds)
        return
    with multiprocessing.Pool(jobs, silence) as pool:
        yield from pool.imap(run, seeds, CHUNK)


def _say(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _listed(counts: Counter[str] | dict[str, int]) -> str:
    return ", ".join(f"{kind} {number}" for kind, number in sorted(counts.items())) or "none"


if __name__ == "__main__":
    sys.exit(main())
