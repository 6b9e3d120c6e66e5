"""One seed, from its options to its verdict."""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from random import Random

import structlog

from psrpc.ops.logs import set_role
from tests.sim.cluster import Cluster
from tests.sim.invariants import Violation
from tests.sim.options import Options, draw, with_attendant, with_slices, with_sums
from tests.sim.schedule import Livelock


@dataclass(frozen=True)
class Verdict:
    """Result of a seed. ``failure`` is empty when everything held; ``digest`` is a checksum of
    all that happened; ``fired`` counts faults, ``counts`` what they led to, ``refused`` the
    errors that calls were answered by."""

    seed: int
    options: Options
    failure: str
    digest: int
    simulated_s: float
    events: int
    cpu_s: float
    fired: Counter[str]
    counts: Counter[str]
    refused: Counter[str]

    def __str__(self) -> str:
        flag = " --attended" if self.options.holds else ""
        flag = " --allreduce" if self.options.hosted else flag
        flag = flag if self.options.exact else " --sums"
        return (
            f"seed {self.seed} fails: {self.failure}\n"
            f"its options: {self.options}\n"
            f"again: python -m tests.sim{flag} --seed {self.seed} --trace"
        )


def run_seed(seed: int, show: Callable[[str], None] | None = None) -> Verdict:
    """Runs what a seed implies. ``show`` gets a line for whatever happens."""
    return run_options(seed, draw(Random(seed)), show)


def run_attended(seed: int, show: Callable[[str], None] | None = None) -> Verdict:
    """Runs what a seed implies, with an attendant."""
    random = Random(seed)
    return run_options(seed, with_attendant(random, draw(random)), show)


def run_hosted(seed: int, show: Callable[[str], None] | None = None) -> Verdict:
    """Runs what a seed implies, with workers that host the shards."""
    random = Random(seed)
    return run_options(seed, with_slices(random, draw(random)), show)


def run_summed(seed: int, show: Callable[[str], None] | None = None) -> Verdict:
    """Runs what a seed implies, with workers that push sums of their gradients of a round."""
    random = Random(seed)
    return run_options(seed, with_sums(random, draw(random)), show)


def run_options(seed: int, options: Options, show: Callable[[str], None] | None = None) -> Verdict:
    """Runs a seed with other options than its own."""
    _freeze()
    cluster = Cluster(seed, options, show)
    failure, began = "", time.process_time()
    # A run is short, and a tenth of it would go into looking for its garbage.
    gc.disable()
    try:
        cluster.run()
    except (Violation, Livelock) as broken:
        failure = str(broken)
    except Exception:
        failure = f"at {cluster.schedule.now():.3f} s: {traceback.format_exc()}"
    finally:
        digest = cluster.schedule.digest()
        cluster.close()
        set_role("")
        gc.enable()
    return Verdict(
        seed,
        options,
        failure,
        digest,
        cluster.schedule.now(),
        cluster.schedule.events,
        time.process_time() - began,
        cluster.faults.fired,
        cluster.counts,
        cluster.network.refused,
    )


@cache
def _freeze() -> None:
    """Keeps what the process has imported out of searches for garbage: a worker that joins anew
    searches, and so does Python after each run."""
    gc.collect()
    gc.freeze()


def silence() -> None:
    """Silences the cores' logs from now on."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@contextmanager
def silenced() -> Iterator[None]:
    """``silence``, until the block ends: tests of logs may follow in the same process."""
    before = structlog.get_config()
    silence()
    try:
        yield
    finally:
        structlog.configure(**before)
