"""Which checkpoint a run goes on from, and which it refuses."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from coordinator.checkpoints import Checkpoints, choose_checkpoint, remove_unfinished
from coordinator.description import JobDescription
from coordinator.snapshots import ShardFile, Taken
from coordinator.work import SnapshotOrder
from psrpc.errors import CheckpointError, InvalidJob
from tests.coordinator.parts import describe, make_run


def job(**changes: Any) -> JobDescription:
    return describe(**{"total_updates": 200, **changes})


def write(run_dir: Path, step: int, generation: int = 1, **changes: Any) -> Path:
    """Commits a checkpoint whose one file holds three bytes."""
    checkpoints = Checkpoints(make_run(run_dir, generation=generation, **changes))
    name = f"step-{step:08d}"
    order = SnapshotOrder(name, step, True, False, f"checkpoints/.tmp-{name}")
    checkpoints.prepare(order)
    (run_dir / order.directory / "a").write_bytes(b"abc")
    file = ShardFile(0, step, "a", 3, hashlib.sha256(b"abc").hexdigest())
    checkpoints.commit(Taken(order, (file,)))
    return run_dir / "checkpoints" / name


def test_the_newest_good_one_is_chosen_and_the_damaged_one_named(tmp_path: Path) -> None:
    write(tmp_path, 100)
    torn = write(tmp_path, 200)
    (torn / "a").write_bytes(b"ab")
    chosen = choose_checkpoint(tmp_path, job())
    assert (chosen.restored.name, chosen.restored.global_step) == ("step-00000100", 100)
    assert (chosen.run_id, chosen.generation) == ("r1", 1)
    assert len(chosen.remarks) == 1
    assert "step-00000200" in chosen.remarks[0]


def test_a_damaged_checkpoint_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 100)
    (write(tmp_path, 200) / "a").write_bytes(b"ab")
    write(tmp_path, 200, generation=2)
    assert choose_checkpoint(tmp_path, job()).restored.global_step == 200


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"data_fingerprint": "beef"}, "its data is 'f00d', the job's is 'beef'"),
        ({"batch_size": 5}, "its batch_size is 4, the job's is 5"),
        ({"seed": 1}, "its seed is 0, the job's is 1"),
        ({"mode": "sync", "replicas": 1}, "its mode is 'async', the job's is 'sync'"),
    ],
)
def test_another_job_is_refused_and_both_values_are_named(
    tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    write(tmp_path, 100)
    with pytest.raises(InvalidJob, match=what):
        choose_checkpoint(tmp_path, job(**changes))


def test_a_job_that_ends_before_the_checkpoint_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 100)
    with pytest.raises(InvalidJob, match=r"it is of step 100, and the job ends at step 50 \(2 epo"):
        choose_checkpoint(tmp_path, job(total_updates=50))


def test_a_changed_job_file_is_remarked(tmp_path: Path) -> None:
    write(tmp_path, 100)
    assert choose_checkpoint(tmp_path, job(job_sha256="ef" * 32)).remarks == (
        "the job file has changed since the checkpoint was written",
    )


def test_only_what_was_never_finished_is_removed(tmp_path: Path) -> None:
    whole = write(tmp_path, 100)
    (tmp_path / "checkpoints" / ".tmp-step-00000200").mkdir()
    remove_unfinished(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == [whole]
    assert choose_checkpoint(tmp_path, job()).restored.global_step == 100


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot resume: no good checkpoint"):
        choose_checkpoint(tmp_path, job())
