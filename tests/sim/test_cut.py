"""A route that stays cut: the others go on, whatever the policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from psrpc.core.policy import ASYNC, Policy
from tests.sim.faults import CUT
from tests.sim.options import Options, draw
from tests.sim.run import run_options, silenced

CUT_S = 1000.0

BATCHES = 8

BATCH_S = 1.0

ENDS_S = 60.0
"""When a job has ended that nothing holds up: some ten seconds of training, five until it is known
that a route is cut, and a generation or two."""

SEEDS = 6


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    with silenced():
        yield


def options(seed: int, policy: Policy) -> Options:
    drawn = draw(Random(seed))
    return replace(
        drawn,
        policy=policy,
        then=None,
        then_after=0,
        changes=(),
        workers=2 + seed % 2,
        shards=1 + seed % 3,
        batches=BATCHES,
        epochs=1,
        batch_size=1,
        local_steps=1,
        records=BATCHES,
        skipped=(),
        tables=0,
        batch_s=BATCH_S,
        far={},
        early=False,
        rates={},
        planned={CUT: 1},
        faults_s=CUT_S,
        cut_s=(CUT_S, CUT_S),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        ASYNC,
        Policy(mode="ssp", staleness=0),
        Policy(mode="sync", replicas=2),
        Policy(mode="sync", replicas=3, aggregate=2),
        Policy(mode="sync", replicas=2, balance=True),
    ],
    ids=str,
)
def test_a_job_ends_while_a_worker_is_cut_off(policy: Policy) -> None:
    cut = 0
    for seed in range(SEEDS):
        verdict = run_options(seed, options(seed, policy))
        assert not verdict.failure, str(verdict)
        cut += verdict.fired[CUT]
        assert verdict.simulated_s < ENDS_S, str(verdict)
    assert cut
