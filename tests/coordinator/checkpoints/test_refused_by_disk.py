"""A coordinator whose ledger cannot be read or written for a while: it says so, and goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.checkpoints.disk import DiskChoice
from coordinator.core.lifecycle import STOPPED
from coordinator.process.summary import summarize
from coordinator.records.stored_values import GENERATION
from psrpc.core.errors import CheckpointError
from tests.coordinator.sync_job import SYNC, phase, refuse, rounds
from tests.coordinator.whole_coordinator import Coordinator, Worker, start


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
    job_run = coordinator.job_run
    coordinator.shards[0].kill()
    coordinator.add(0, 20)
    with monkeypatch.context() as broken:
        broken.setattr(coordinator.store, method, refuse)
        tick(coordinator)
        assert (job_run.run.generation, job_run.phase) == (1, "recovering")
        assert awaited in job_run.waiting_for()
        assert len([w for w in job_run.warnings.kept if "disk I/O error" in w]) == 1
    tick(coordinator)
    assert (job_run.run.generation, job_run.phase) == (2, "training")


def test_a_generation_begins_when_the_ledger_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, _ = start(tmp_path, **SYNC)
    job_run = coordinator.job_run
    coordinator.shards[0].kill()
    coordinator.add(0, 20)
    coordinator.tick()
    coordinator.disk.work()
    assert (job_run.run.generation, job_run.complete) == (2, False)
    with monkeypatch.context() as broken:
        broken.setattr(coordinator.store, "newest_checkpoint", refuse)
        tick(coordinator)
        assert job_run.generations.formation.complete
        assert (job_run.complete, job_run.phase) == (False, "recovering")
        assert job_run.waiting_for() == "generation 2 to begin: disk I/O error"
    tick(coordinator)
    assert (job_run.complete, job_run.phase) == (True, "training")


def test_a_checkpoint_is_committed_though_results_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = {"metric": "loss", "lower": True}
    coordinator, worker = start(tmp_path, **SYNC, keep_best=best, checkpoint_every=1)
    training = coordinator.job_run.training
    coordinator.store.put_evaluation("epoch-0", 1, 1, {"loss": 0.5})
    one_round(coordinator, worker)
    with monkeypatch.context() as broken:
        broken.setattr(coordinator.store, "scores", refuse)
        one_round(coordinator, worker)
        scores = training.notes.scores(coordinator.job_run.run.description.keep_best)
        assert scores == {(1, 1): 0.5}, "or the best might be removed"
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000002"
    assert not training.orders.snapshots.writing
    assert "results cannot be read: disk I/O error" in coordinator.job_run.warnings.kept[-1]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_final_checkpoint_that_cannot_be_written_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    coordinator, worker = start(tmp_path, **SYNC)
    job_run = coordinator.job_run

    def full(*_: object) -> None:
        raise CheckpointError("no space")

    with monkeypatch.context() as broken:
        broken.setattr(coordinator.disk, "prepare", full)
        for _ in range(4):
            one_round(coordinator, worker)
        tick(coordinator)
        assert job_run.phase == "finishing"
        awaited = "the final state to be saved: PS401: no space; tried again after 2 s"
        assert awaited in job_run.waiting_for()
        if stopped:
            job_run.stop()
            assert job_run.waiting_for() == awaited
    coordinator.tick()
    coordinator.tick(1.0)
    tick(coordinator)
    assert job_run.checkpoints.newest == "checkpoints/step-00000004.r2"
    assert (job_run.phase, job_run.reason) == (("failed", STOPPED) if stopped else ("done", ""))


def test_a_run_directory_that_is_gone_is_named_once_and_not_promised(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    coordinator, worker = start(run_dir, **SYNC, checkpoint_every=1)
    job_run = coordinator.job_run
    one_round(coordinator, worker)
    assert job_run.checkpoints.newest == "checkpoints/step-00000001"
    run_dir.rename(tmp_path / "elsewhere")
    for _ in range(2):
        one_round(coordinator, worker)
    [said] = [warning for warning in job_run.warnings.kept if "is gone" in warning]
    assert said.startswith(
        f"snapshot step-00000002 failed: PS504: run directory {run_dir} is gone, it was deleted or "
        "its file system unmounted: nothing of the run is saved there any more; training goes on"
    )
    assert job_run.phase == "training"
    assert job_run.checkpoints.newest == ""
    job_run.fail("diverged")
    assert summarize(job_run)["resume"] == ""


def test_a_run_directory_that_is_back_is_written_to(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    coordinator, worker = start(run_dir, **SYNC, checkpoint_every=1)
    run_dir.rename(tmp_path / "elsewhere")
    one_round(coordinator, worker)
    (tmp_path / "elsewhere").rename(run_dir)
    one_round(coordinator, worker)
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000002"


def one_round(coordinator: Coordinator, worker: Worker) -> None:
    for _ in range(2):
        worker.commit(worker.round())
    coordinator.settle()


def test_no_generation_goes_out_that_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(coordinator.store, "put_all", refuse)
        shards = [coordinator.add(index, 10 + index) for index in range(2)]
        coordinator.settle()
        coordinator.tick()
        coordinator.settle()
        assert [shard.begins for shard in shards] == [[], []]
        assert coordinator.job_run.warnings.kept == [
            "generation 1 cannot be stored: disk I/O error; tried again"
        ]
        assert phase(coordinator) == "waiting"
    coordinator.tick()
    coordinator.settle()
    assert coordinator.store.get(GENERATION) == 1
    assert phase(coordinator) == "initializing"


def test_a_decision_that_waits_for_the_disk_is_dropped_with_its_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, worker = start(tmp_path, **SYNC)
    with monkeypatch.context() as full:
        full.setattr(coordinator.store, "put_decision", refuse)
        for _ in range(2):
            worker.commit(worker.round())
    coordinator.shards[1].kill()
    coordinator.add(1, 21)
    coordinator.tick()
    assert coordinator.store.last_decision(0) is None
    coordinator.settle()
    coordinator.tick()
    assert coordinator.job_run.standing == (2, 0)
    assert coordinator.store.last_decision(0) is None
    assert coordinator.shards[0].version == 0


def test_a_disk_that_does_not_say_which_checkpoint_is_good_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, _ = start(tmp_path)
    coordinator.shards[0].kill()
    coordinator.add(0, 20)
    for _ in range(3):
        coordinator.tick()
    assert len(coordinator.disk.queue) == 1
    with monkeypatch.context() as broken:
        broken.setattr(
            "coordinator.checkpoints.disk.choose", lambda *_: DiskChoice(None, "EIO", again=True)
        )
        coordinator.disk.work()
        assert phase(coordinator) == "recovering"
        assert "EIO; tried again" in coordinator.job_run.warnings.kept
    coordinator.tick()
    coordinator.settle()
    assert phase(coordinator) == "training"


def test_a_choice_is_kept_while_its_generation_cannot_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, _ = start(tmp_path)
    coordinator.shards[0].kill()
    coordinator.add(0, 20)
    with monkeypatch.context() as full:
        full.setattr(coordinator.store, "put_all", refuse)
        coordinator.settle()
        coordinator.tick()
        assert coordinator.disk.queue == []
        assert coordinator.job_run.run.generation == 1
    coordinator.tick()
    assert coordinator.job_run.run.generation == 2


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_shards_whose_checkpoint_could_not_be_noted_go_on_where_they_are(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("coordinator.records.store.Store.put_checkpoint", refuse)
        coordinator, worker = start(tmp_path, **(SYNC if mode == "sync" else {}))
        if mode == "sync":
            rounds(coordinator, worker, 1)
        else:
            worker.lease(worker.train(worker.batches()))
        shards = list(coordinator.shards)
        coordinator.restart()
        for shard in shards:
            shard.connect()
        coordinator.settle()
    assert phase(coordinator) == "training"
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000001.g2"
