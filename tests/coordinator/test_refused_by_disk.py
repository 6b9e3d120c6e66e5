"""A coordinator whose ledger cannot be read or written for a while: it says so, and goes on."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from coordinator.stopping import STOPPED
from psrpc.errors import CheckpointError
from tests.coordinator.bench import Coordinator, Worker, start

SYNC: dict[str, Any] = {
    "mode": "sync",
    "replicas": 2,
    "epochs": 2,
    "train_records": 16,
    "total_updates": 4,
}


def refuse(*_: object) -> None:
    raise sqlite3.OperationalError("disk I/O error")


def tick(coordinator: Coordinator) -> None:
    for _ in range(3):
        coordinator.tick()
        coordinator.settle()


@pytest.mark.parametrize(
    ("method", "awaited"),
    [
        ("last_decision", "generation 2 to be formed: disk I/O error"),
        ("newest_checkpoint", "generation 2 to be formed: disk I/O error"),
        ("put_all", "generation 2 to be stored: disk I/O error"),
    ],
)
def test_a_generation_is_formed_when_the_ledger_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, awaited: str
) -> None:
    coordinator, _ = start(tmp_path, **SYNC)
    course = coordinator.course
    coordinator.shards[0].kill()
    coordinator.add(0, 20)
    with monkeypatch.context() as broken:
        broken.setattr(coordinator.store, method, refuse)
        tick(coordinator)
        assert (course.run.generation, course.phase) == (1, "recovering")
        assert awaited in course.waiting_for()
        assert len([w for w in course.warnings.kept if "disk I/O error" in w]) == 1
    tick(coordinator)
    assert (course.run.generation, course.phase) == (2, "training")


def test_a_generation_begins_when_the_ledger_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, _ = start(tmp_path, **SYNC)
    course = coordinator.course
    coordinator.shards[0].kill()
    coordinator.add(0, 20)
    coordinator.tick()
    coordinator.disk.work()
    assert (course.run.generation, course.complete) == (2, False)
    with monkeypatch.context() as broken:
        broken.setattr(coordinator.store, "newest_checkpoint", refuse)
        tick(coordinator)
        assert course.generations.formation.complete
        assert (course.complete, course.phase) == (False, "recovering")
        assert course.waiting_for() == "generation 2 to begin: disk I/O error"
    tick(coordinator)
    assert (course.complete, course.phase) == (True, "training")


def test_a_checkpoint_is_committed_though_results_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = {"metric": "loss", "lower": True}
    coordinator, worker = start(tmp_path, **SYNC, keep_best=best, checkpoint_every=1)
    training = coordinator.course.training
    coordinator.store.put_evaluation("epoch-0", 1, 1, {"loss": 0.5})
    one_round(coordinator, worker)
    with monkeypatch.context() as broken:
        broken.setattr(coordinator.store, "scores", refuse)
        one_round(coordinator, worker)
        scores = training.notes.scores(coordinator.course.run.description.keep_best)
        assert scores == {(1, 1): 0.5}, "or the best might be removed"
    assert coordinator.course.checkpoints.newest == "checkpoints/step-00000002"
    assert not training.orders.snapshots.writing
    assert "results cannot be read: disk I/O error" in coordinator.course.warnings.kept[-1]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_final_checkpoint_that_cannot_be_written_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    coordinator, worker = start(tmp_path, **SYNC)
    course = coordinator.course

    def full(*_: object) -> None:
        raise CheckpointError("no space")

    with monkeypatch.context() as broken:
        broken.setattr(coordinator.disk, "prepare", full)
        for _ in range(4):
            one_round(coordinator, worker)
        tick(coordinator)
        assert course.phase == "finishing"
        awaited = "the final state to be saved: PS401: no space; tried again after 10 s"
        assert awaited in course.waiting_for()
        if stopped:
            course.stop()
            assert course.waiting_for() == awaited
    coordinator.tick(9.0)
    tick(coordinator)
    assert course.checkpoints.newest == "checkpoints/step-00000004.r1"
    assert (course.phase, course.reason) == (("failed", STOPPED) if stopped else ("done", ""))


def one_round(coordinator: Coordinator, worker: Worker) -> None:
    for _ in range(2):
        worker.commit(worker.round())
    coordinator.settle()
