"""The simulation of many members: small crowds with every fault, and a planted bug."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.schedule.ledger import Ledger
from tests.sim.run import silence
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
def quiet() -> None:
    silence()


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


def test_work_that_is_opened_before_shards_refuse_its_worker_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    revoke = Ledger.revoke

    def early(ledger: Ledger, worker: str) -> Any:
        attempts = revoke(ledger, worker)
        ledger.release(worker)
        return attempts

    monkeypatch.setattr(Ledger, "revoke", early)
    options = Options(
        workers=12, shards=4, batches=100, workers_killed=0, workers_paused=60, shards_killed=0
    )
    assert any("applies attempt" in run_crowd(seed, options).failure for seed in range(4))
