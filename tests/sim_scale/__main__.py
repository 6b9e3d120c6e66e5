"""``python -m tests.sim_scale``: a thousand workers and a hundred shards, seed after seed."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections import Counter
from functools import partial

from tests.sim.run import silence
from tests.sim_scale.cluster import Options, run_crowd


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 when a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim_scale", description=__doc__)
    default = Options()
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="run seeds 0 to N - 1")
    parser.add_argument("--seed", type=int, metavar="N", help="run this one alone")
    parser.add_argument("--workers", type=int, default=default.workers)
    parser.add_argument("--shards", type=int, default=default.shards)
    parser.add_argument("--batches", type=int, default=default.batches, help="of an epoch")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="J", help="processes")
    asked = parser.parse_args(arguments)
    options = Options(workers=asked.workers, shards=asked.shards, batches=asked.batches)
    seeds = range(asked.seeds) if asked.seed is None else (asked.seed,)
    fired: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    failed, cpu_s = [], 0.0
    with multiprocessing.Pool(asked.jobs, silence) as pool:
        for verdict in pool.imap(partial(run_crowd, options=options), seeds):
            fired += verdict.fired
            counts += verdict.counts
            cpu_s += verdict.cpu_s
            failed += [verdict.seed] if verdict.failure else []
            sys.stdout.write(
                f"seed {verdict.seed}: {verdict.simulated_s:.0f} simulated seconds, "
                f"{verdict.events} events, {verdict.cpu_s:.1f} s of CPU: "
                f"{verdict.failure or 'done'}\n"
            )
            sys.stdout.flush()
    sys.stdout.write(
        f"{len(seeds)} seeds, {cpu_s:.0f} s of CPU; failed: "
        f"{', '.join(map(str, failed)) or 'none'}\nfaults: {dict(sorted(fired.items()))}\n"
        f"{dict(sorted(counts.items()))}\n"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
