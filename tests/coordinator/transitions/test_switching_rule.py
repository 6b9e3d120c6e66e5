"""The job's own rule: when it goes over to another policy by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.core.run import Followed
from psrpc.core.policy import ASYNC, Policy
from tests.coordinator.switching_job import (
    PAIRS,
    SSP,
    SYNC,
    again,
    ask,
    do,
    finish,
    held,
    job,
    work,
    written,
)
from tests.coordinator.whole_coordinator import start


def rule(policy: Policy, epoch: int = 1) -> dict[str, Any]:
    return {"then": {"policy": policy.to_json(), "epoch": epoch}}


@pytest.mark.parametrize(("first", "then"), PAIRS, ids=str)
def test_a_job_goes_over_by_its_rule(tmp_path: Path, first: Policy, then: Policy) -> None:
    coordinator, worker = start(tmp_path, **job(first, **rule(then)))
    work(coordinator, worker, 4)
    run = coordinator.job_run.run
    step = 2 if first.rounds else 4
    assert run.policies == (Followed(2, then, step, 4),)
    assert held(coordinator) == [{0: [(0, 16)]}] * 2
    assert coordinator.job_run.warnings.kept == []
    worker.join()
    finish(coordinator, worker)


@pytest.mark.parametrize(("first", "then"), PAIRS, ids=str)
def test_the_rule_is_due_after_a_restart(tmp_path: Path, first: Policy, then: Policy) -> None:
    coordinator, worker = start(tmp_path, **job(first, **rule(then)))
    shards = list(coordinator.shards)
    # The last batch is done and the coordinator dies before it can go over.
    done = 0
    while done < 4:
        done += do(worker, worker.lease())
        for shard in shards:
            shard.obey()
    again(coordinator, shards)
    assert coordinator.job_run.run.settings == then
    worker.join()
    finish(coordinator, worker)


def test_the_rule_waits_for_batches_that_are_lost_again(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(SYNC, **rule(ASYNC)))
    for _ in range(4):
        worker.commit(worker.round())
    assert str(coordinator.job_run.changes)
    coordinator.shards[1].kill()
    coordinator.add(1, 21)
    coordinator.settle()
    assert coordinator.job_run.run.policy == 1
    assert str(coordinator.job_run.changes) == ""
    worker.join()
    work(coordinator, worker, 4)
    assert coordinator.job_run.run.policies == (Followed(2, ASYNC, 2, 4),)
    worker.join()
    finish(coordinator, worker)


def test_a_change_by_hand_is_stronger_than_the_rule(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(SYNC, **rule(ASYNC)))
    work(coordinator, worker, 2)
    ask(coordinator, *written(SSP))
    coordinator.settle()
    assert coordinator.job_run.warnings.kept == [
        "the job's rule (async after epoch 1) is not followed: its policy was changed by hand"
    ]
    shards = list(coordinator.shards)
    again(coordinator, shards)
    worker.join()
    finish(coordinator, worker)
    assert coordinator.job_run.run.settings == SSP
