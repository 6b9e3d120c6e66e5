"""A run that stops early, or goes on more slowly: at a definite step, also after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.core.work import EvaluationWork, Wait
from coordinator.display.timeline import events_between
from coordinator.process.result import _rows
from coordinator.process.summary import summarize
from coordinator.rpc.status import write_status
from psrpc.checkpoint.manifest import MANIFEST
from psrpc.core.commands import Ended
from psrpc.core.policy import ASYNC, Policy
from psrpc.core.shard_reports import ShardFile, SnapshotReport
from tests.coordinator.switching_job import SSP, SYNC, again
from tests.coordinator.whole_coordinator import Worker, start
from tests.coordinator.working_loop import LOSSES, Loop

POLICIES = [ASYNC, SYNC, SSP]
JOB: dict[str, Any] = {
    "epochs": 9,
    "train_records": 16,
    "eval_records": 4,
    "total_updates": 36,
    "optimizer": {"class_name": "SGD", "config": {"learning_rate": 0.5}},
}
STOP = {"metric": "loss", "lower": True, "patience": 2, "min_delta": 0.0, "restore_best": False}
REDUCE = {
    "metric": "loss",
    "lower": True,
    "patience": 1,
    "min_delta": 0.0,
    "factor": 0.5,
    "cooldown": 0,
    "min_lr": 0.0,
}


def job(policy: Policy, **changes: Any) -> dict[str, Any]:
    return {**JOB, **policy.to_json(), **changes}


def begin(tmp_path: Path, policy: Policy, **changes: Any) -> Loop:
    return Loop(*start(tmp_path, **job(policy, **changes)))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_run_stops_once_its_patience_is_over(tmp_path: Path, policy: Policy) -> None:
    loop = begin(tmp_path, policy, stop_early=STOP)
    loop.run()
    job_run = loop.coordinator.job_run
    assert job_run.reason == (
        "stopped early at epoch 4: loss did not improve for 2 epochs; best epoch 2"
    )
    assert not job_run.end().failed
    assert loop.trained == sorted([0, 1, 2, 3] * 4)
    assert [row.evaluation for row in job_run.training.epochs.history.rows] == [
        {"loss": loss} for loss in LOSSES[:4]
    ]
    summary = summarize(job_run)
    assert (summary["phase"], summary["batches"], summary["best"]) == ("done", 16, None)
    # The last epoch's evaluation is the final one: the same state is not evaluated twice.
    assert [found["evaluation"] for found in summary["evaluations"]][-1] == "epoch-4"


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_no_epoch_begins_before_the_one_before_is_evaluated(tmp_path: Path, policy: Policy) -> None:
    loop = begin(tmp_path, policy, stop_early=STOP)
    loop.run(lambda: len(loop.trained) == 4)
    other = Worker(loop.coordinator, 2)
    loop.coordinator.settle()
    evaluating = loop.worker.lease()
    assert isinstance(evaluating, EvaluationWork)
    found = other.lease()
    assert isinstance(found, Wait)
    assert found.reason.startswith("epoch 1 to be evaluated: ")
    assert loop.coordinator.job_run.waiting_for().startswith("epoch 1 to be evaluated: worker-0")


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_epoch_is_evaluated_where_the_job_says_so(tmp_path: Path, policy: Policy) -> None:
    """Another worker gets nothing while an epoch is evaluated."""
    best = {"metric": "loss", "lower": True}
    loop = begin(tmp_path, policy, evaluate_every_epoch=True, keep_best=best)
    loop.run(lambda: len(loop.trained) == 4)
    other = Worker(loop.coordinator, 2)
    loop.coordinator.settle()
    evaluating = loop.worker.lease()
    assert isinstance(evaluating, EvaluationWork)
    found = other.lease()
    assert isinstance(found, Wait)
    assert found.reason.startswith("epoch 1 to be evaluated: ")
    loop._do(evaluating)
    loop.run()
    job_run = loop.coordinator.job_run
    assert loop.trained == sorted(list(range(9)) * 4)
    assert [row.evaluation for row in job_run.training.epochs.history.rows] == [
        {"loss": loss} for loss in LOSSES
    ]
    assert job_run.training.notes.scores(job_run.run.description.keep_best)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("batches", [4, 6, 8, 12, 15, 16])
def test_a_coordinator_that_was_restarted_decides_as_before(
    tmp_path: Path, policy: Policy, batches: int
) -> None:
    loop = begin(tmp_path, policy, stop_early=STOP, reduce_lr=REDUCE)
    loop.run(lambda: len(loop.trained) >= batches)
    again(loop.coordinator, list(loop.coordinator.shards))
    loop.worker.join()
    loop.run()
    assert loop.coordinator.job_run.reason.startswith("stopped early at epoch 4: ")
    # The job is done, so its processes end with success.
    assert loop.coordinator.job_run.end() == Ended(False)
    assert loop.rates == {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("batches", [2, 5, 8, 13, 15, 19])
def test_the_learning_rate_falls_at_the_same_step_after_any_kill(
    tmp_path: Path, policy: Policy, batches: int
) -> None:
    """Batches that a lost shard had are done again, at the rate that they were done at."""
    loop = begin(tmp_path, policy, reduce_lr=REDUCE, epochs=5, total_updates=20)
    loop.run(lambda: len(loop.trained) >= batches)
    for shard in list(loop.coordinator.shards):
        shard.kill()
    for index in range(2):
        loop.coordinator.add(index, 20 + index)
    loop.coordinator.settle()
    loop.worker.join()
    loop.run()
    assert loop.rates == {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.5, 4: 0.25}
    rows = loop.coordinator.job_run.training.epochs.history.rows
    assert [row.learning_rate for row in rows] == [0.5, 0.5, 0.5, 0.25, 0.125]
    batches_per_step = 2 if policy.rounds else 1
    changes = [
        (one.step * batches_per_step, one.rate) for one in loop.coordinator.job_run.run.policies
    ]
    assert changes == [(12, 0.5), (16, 0.25)]


def test_the_learning_rate_is_reduced_when_an_epoch_begins(tmp_path: Path) -> None:
    loop = begin(tmp_path, SYNC, reduce_lr=REDUCE, epochs=4, total_updates=8)
    loop.run()
    assert loop.rates == {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.5}


def test_a_lower_learning_rate_is_told(tmp_path: Path) -> None:
    loop = begin(tmp_path, SYNC, reduce_lr=REDUCE, epochs=5, total_updates=10)
    loop.run(lambda: len(loop.trained) == 2)
    before = write_status(loop.coordinator.job_run)
    loop.run(lambda: len(loop.trained) == 14)
    then = write_status(loop.coordinator.job_run)
    loop.run()
    after = write_status(loop.coordinator.job_run)
    assert [
        event.text
        for one, other in ((before, then), (then, after))
        for event in events_between(one, other)
        if event.kind in ("mode", "restart")
    ] == [
        "learning rate 0.25 from epoch 4 on (val_loss has not improved for 1 epoch)",
        "learning rate 0.125 from epoch 5 on (val_loss has not improved for 1 epoch)",
    ]


def test_the_learning_rate_of_a_restarted_coordinator_is_the_same(tmp_path: Path) -> None:
    """It does not fall once more, nor is another policy stored."""
    loop = begin(tmp_path, SYNC, reduce_lr=REDUCE, epochs=4, total_updates=8)
    loop.run(lambda: len(loop.trained) == 14)
    again(loop.coordinator, list(loop.coordinator.shards))
    loop.worker.join()
    loop.run()
    assert [one.rate for one in loop.coordinator.job_run.run.policies] == [0.5]
    assert loop.rates == {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.5}


def test_a_checkpoint_says_what_the_learning_rate_was_multiplied_by(tmp_path: Path) -> None:
    loop = begin(tmp_path, SYNC, reduce_lr=REDUCE, epochs=5, total_updates=10)
    loop.run()
    newest = tmp_path / loop.coordinator.job_run.checkpoints.newest
    assert json.loads((newest / MANIFEST).read_text())["details"]["rate"] == 0.25


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_run_comes_to_the_checkpoint_of_its_best_epoch(tmp_path: Path, policy: Policy) -> None:
    objective = {"metric": "loss", "lower": True}
    stop = {**STOP, "restore_best": True}
    loop = begin(tmp_path, policy, stop_early=stop, keep_best=objective, keep_checkpoints=1)
    loop.run()
    best = summarize(loop.coordinator.job_run)["best"]
    step = 4 if policy.rounds else 8
    checkpoint = f"checkpoints/step-{step:08d}"
    assert best == {
        "epoch": 2,
        "checkpoint": checkpoint,
        "global_step": step,
        "loss": 4.0,
        "by": "loss",
        "restored": True,
    }
    assert (tmp_path / checkpoint / MANIFEST).exists()


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_best_epoch_that_a_run_keeps_is_told(tmp_path: Path, policy: Policy) -> None:
    """With what exports it, which takes the newest by itself."""
    objective = {"metric": "loss", "lower": True}
    loop = begin(tmp_path, policy, evaluate_every_epoch=True, keep_best=objective, epochs=4)
    loop.run()
    summary = summarize(loop.coordinator.job_run)
    best = summary["best"]
    assert (best["epoch"], best["loss"], best["restored"]) == (2, 4.0, False)
    assert best["checkpoint"] != summary["checkpoint"]
    assert (tmp_path / best["checkpoint"] / MANIFEST).exists()
    told = dict(_rows(summary, tmp_path))["best epoch"]
    assert told == (
        f"2, in {best['checkpoint']} (loss 4); coordinator export takes it with --step "
        f"{best['global_step']}"
    )


def test_an_evaluation_whose_snapshot_fails_is_ordered_again(tmp_path: Path) -> None:
    loop = begin(tmp_path, SYNC, stop_early=STOP)
    take = loop.coordinator.shards[0].take
    failed: list[str] = []

    def refuse(order: Any) -> None:
        if order.keep and not failed:
            failed.append(order.name)
            incarnation = loop.coordinator.shards[0].incarnation
            loop.coordinator.engine.shards.report_snapshot(
                SnapshotReport(incarnation, 1, order.name, ShardFile(0, 2), "ENOMEM")
            )
        else:
            take(order)

    loop.coordinator.shards[0].take = refuse  # type: ignore[method-assign]
    loop.run()
    assert failed == ["epoch-1"]
    assert loop.coordinator.job_run.reason.startswith("stopped early at epoch 4")
