"""The simulation of many members: small crowds with every fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sim.run import silenced
from tests.sim_scale.cluster import Options, run_crowd

SMALL = Options(
    workers=12,
    shards=4,
    batches=100,
    batch_s=1.0,
    faults_s=20.0,
    workers_killed=6,
    workers_paused=8,
    lost=0.02,
)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    with silenced():
        yield


@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_trains_everything_whatever_happens(seed: int) -> None:
    verdict = run_crowd(seed, SMALL)
    assert not verdict.failure
    assert verdict.counts["batches"] == 200
    assert verdict.fired["worker killed"] == 6
    assert verdict.fired["shard killed"] == verdict.fired["coordinator killed"] == 1


def test_a_seed_is_the_same_twice() -> None:
    once, again = run_crowd(3, SMALL), run_crowd(3, SMALL)
    assert (once.events, once.simulated_s) == (again.events, again.simulated_s)
