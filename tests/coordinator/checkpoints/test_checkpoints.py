"""Which checkpoint a run goes on from, and which it refuses."""

from __future__ import annotations

import errno
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.checkpoints.checkpoints import Checkpoints, remove_unfinished
from coordinator.checkpoints.choice import check_changed_copy, choose_checkpoint
from coordinator.checkpoints.disk import choose
from coordinator.checkpoints.snapshots import Taken, checkpoint_name, temporary_directory
from coordinator.core.description import JobDescription
from coordinator.core.run import Followed, RestoredCheckpoint, Run
from coordinator.process.options import ServeOptions
from coordinator.process.settling import settle
from coordinator.process.summary import read_counted
from coordinator.records.run_directory import RunDirectory
from coordinator.records.store import Store
from psrpc.checkpoint.checkpoint import (
    ShardState,
    newest_good,
    read_manifest,
    shard_file_name,
    write_shard_file,
)
from psrpc.checkpoint.manifest import MANIFEST
from psrpc.core.commands import SnapshotOrder
from psrpc.core.errors import CheckpointError, InvalidJob
from psrpc.core.policy import Policy
from psrpc.core.shard_reports import ShardFile
from psrpc.files.storage import Disk
from psrpc.options.settings import Resumption
from tests.changed_copy import write_changed_copy
from tests.coordinator.builders import describe, make_run


def job(**changes: Any) -> JobDescription:
    return describe(**{"total_updates": 200, **changes})


def write(run_dir: Path, step: int, generation: int = 1, **changes: Any) -> Path:
    """Commits a checkpoint whose one file holds three bytes."""
    return commit(Checkpoints(make_run(run_dir, **changes)), run_dir, step, generation)


def commit(checkpoints: Checkpoints, run_dir: Path, step: int, generation: int = 1) -> Path:
    """Orders, writes and commits one."""
    name = checkpoint_name(step, generation)
    order = SnapshotOrder(name, step, True, False, temporary_directory(name))
    checkpoints.prepare(order)
    (run_dir / order.directory / "a").write_bytes(b"abc")
    file = ShardFile(0, step, "a", 3, hashlib.sha256(b"abc").hexdigest())
    checkpoints.commit(Taken(order, (file,)), generation)
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


def test_a_later_generation_is_newer_and_writes_over_nothing(tmp_path: Path) -> None:
    write(tmp_path, 100)
    damaged = write(tmp_path, 200)
    (damaged / "a").write_bytes(b"ab")
    write(tmp_path, 200, generation=2)
    chosen = choose_checkpoint(tmp_path, job())
    assert (chosen.restored.name, chosen.generation) == ("step-00000200.g2", 2)
    assert damaged.is_dir()
    write(tmp_path, 150, generation=3)
    assert choose_checkpoint(tmp_path, job()).restored.name == "step-00000150.g3"


def test_one_that_a_shard_could_not_load_is_not_chosen_again(tmp_path: Path) -> None:
    write(tmp_path, 100)
    newest = write(tmp_path, 200)
    chosen = choose_checkpoint(tmp_path, job(), "r1", {newest.name: "shard 1 cannot read it"})
    assert chosen.restored.global_step == 100
    assert chosen.remarks == ("passed over step-00000200: shard 1 cannot read it",)
    with pytest.raises(CheckpointError, match="step-00000200 is of run r1; expected r2"):
        choose_checkpoint(tmp_path, job(), "r2")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"data_fingerprint": "beef"}, "its data is 'f00d', the job's is 'beef'"),
        (
            {"data_fingerprint": "beef"},
            r"the training data \(train=\) has changed, and has \d+ record",
        ),
        ({"batch_size": 5}, "its batch_size is 4, the job's is 5"),
        (
            {"batch_size": 4, "local_steps": 2},
            "its batch_size x local_steps is 4, the job's is 4 x 2 = 8;.* Set them back",
        ),
        ({"seed": 1}, "its seed is 0, the job's is 1"),
        ({"name": "other", "seed": 1}, "is of job 'tiny' and not of 'other': its seed is 0"),
    ],
)
def test_another_job_is_refused_and_both_values_are_named(
    tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    write(tmp_path, 100)
    with pytest.raises(InvalidJob, match=what):
        choose_checkpoint(tmp_path, job(**changes))


def test_another_vocabulary_is_refused_and_both_sizes_are_named(tmp_path: Path) -> None:
    """Before any shard restores: the run and its checkpoints stay as they are."""
    write(tmp_path, 100)
    variables = job().document["variables"]
    first = dict(variables[0], shape=[1, *variables[0]["shape"][1:]])
    dtype, shape = first["dtype"], variables[0]["shape"]
    with pytest.raises(InvalidJob) as refused:
        choose_checkpoint(tmp_path, job(variables=[first, *variables[1:]]))
    assert refused.value.code == "PS405"
    assert str(refused.value).endswith(
        f"has variable {first['name']!r} as trainable {dtype}{shape}; the job has it as trainable "
        f"{dtype}{first['shape']} (was a vocabulary or another size of a layer changed?): set it "
        "back, or start a new run"
    )
    with pytest.raises(InvalidJob, match="the job has it as none: set it back"):
        choose_checkpoint(tmp_path, job(variables=variables[1:]))


def test_an_optimizer_with_other_slots_is_refused_and_both_are_named(tmp_path: Path) -> None:
    write_applied(make_run(tmp_path, shards=2), 4, [[], []], slots=("momentums", "velocities"))
    adamw = {"class_name": "AdamW", "config": {"learning_rate": 0.1}}
    fits = ["iterations", "momentums", "velocities"]
    assert choose_checkpoint(tmp_path, job(optimizer=adamw, slots=fits)).remarks == ()
    what = r"is SGD \(iterations, momentums, velocities\), the job's is AdamW \(iterations\)"
    with pytest.raises(InvalidJob, match=what) as refused:
        choose_checkpoint(tmp_path, job(optimizer=adamw, slots=["iterations"]))
    assert refused.value.code == "PS405"


def test_a_job_that_ends_before_the_checkpoint_is_refused(tmp_path: Path) -> None:
    applied = [[{"epoch": 1, "applied": [[4, 8]], "skipped": []}]]
    write_applied(make_run(tmp_path), 4, applied)
    assert choose_checkpoint(tmp_path, job(total_updates=1)).restored.global_step == 4
    says = "has batches of epoch 2, and the job has 1; say --set epochs=2 or more, or start a new"
    with pytest.raises(InvalidJob, match=says):
        choose_checkpoint(tmp_path, job(epochs=1))


def test_a_checkpoint_says_under_which_policy_it_was_taken(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_applied(run, 4, [[]], Followed(3, Policy(mode="sync", replicas=2)))
    manifest = read_manifest(tmp_path / "checkpoints" / "step-00000004")
    assert (manifest.policy, manifest.mode, manifest.replicas) == (3, "sync", 2)
    assert choose_checkpoint(tmp_path, job()).restored == RestoredCheckpoint(
        "step-00000004", 4, policy=3
    )


def test_local_steps_make_batches_larger(tmp_path: Path) -> None:
    write(tmp_path, 100, local_steps=2)
    with pytest.raises(InvalidJob, match="its batch_size is 8, the job's is 4"):
        choose_checkpoint(tmp_path, job())


def test_a_changed_job_file_is_remarked(tmp_path: Path) -> None:
    write(tmp_path, 100)
    assert choose_checkpoint(tmp_path, job(job_sha256="ef" * 32)).remarks == (
        "the job file has changed since the checkpoint was written",
    )


def write_applied(
    run: Run,
    step: int,
    applied: list[list[dict[str, Any]]],
    under: Followed | None = None,
    slots: tuple[str, ...] = (),
) -> None:
    """A checkpoint whose shards have applied these batches, with an optimizer of these slots."""
    name = checkpoint_name(step)
    order = SnapshotOrder(name, step, True, False, temporary_directory(name))
    checkpoints = Checkpoints(run)
    checkpoints.prepare(order)
    files = []
    for shard, mine in enumerate(applied):
        values = {a.name: np.zeros(a.shard_length(shard), a.dtype) for a in run.plan.arenas}
        written = write_shard_file(
            run.run_dir / order.directory / shard_file_name(shard, len(applied)),
            run.plan,
            shard,
            ShardState(
                values=values,
                elements=dict.fromkeys(slots, values),
                variables={},
                scalars={"iterations": np.array(4, np.int64)},
                version=4,
                applied=tuple(mine),
            ),
            run_id=run.run_id,
            generation=1,
            global_step=step,
        )
        files.append(ShardFile(shard, 4, written.name, written.nbytes, written.sha256))
    checkpoints.commit(Taken(order, tuple(files), under), 1)


APART: list[list[dict[str, Any]]] = [
    [{"epoch": 0, "applied": [[0, 10]], "skipped": []}],
    [
        {"epoch": 0, "applied": [[0, 4]], "skipped": []},
        {"epoch": 1, "applied": [[4, 8]], "skipped": []},
    ],
]


def test_how_many_batches_another_plan_cannot_keep_apart(tmp_path: Path) -> None:
    """In async mode a snapshot falls between the arrivals of a batch at the shards."""
    write_applied(make_run(tmp_path, shards=2), 4, APART)
    assert choose_checkpoint(tmp_path, job()).batches == 1

    def remarks(shards: int) -> tuple[str, ...]:
        plan = make_run(tmp_path, shards=shards).plan
        return choose_checkpoint(tmp_path, job(), plan=plan).remarks

    assert remarks(2) == ()
    [remark] = remarks(3)
    assert remark == (
        "3 batches count twice on parts of the parameters: step-00000004 was taken while some "
        "shards had applied them and others had not; go on with the plan that it was written "
        "with (2 shards) to avoid it"
    )
    chosen = choose(make_run(tmp_path, shards=1), {}).chosen
    assert chosen is not None
    assert chosen.remarks == (remark,)


def test_a_run_remembers_what_may_count_twice(tmp_path: Path) -> None:
    write_applied(make_run(tmp_path, shards=2), 4, APART)
    file = tmp_path / "tiny.py"
    file.touch()

    def settled(shards: int, resume: bool) -> int:
        resumption: Resumption = "always" if resume else "never"
        options = ServeOptions(job=file, shards=shards, resumption=resumption)
        directory, plan = RunDirectory(tmp_path, resume), make_run(tmp_path, shards=shards).plan
        with Store(tmp_path / "ledger.sqlite") as store:
            return settle(options, job(), plan, directory, store).counted_twice

    assert settled(2, resume=True) == 0
    assert settled(3, resume=True) == 3
    assert settled(3, resume=False) == 3


EVERYTHING = [{"epoch": epoch, "applied": [[0, 10]], "skipped": []} for epoch in (0, 1)]
SKIPPED = [{"epoch": 0, "applied": [[0, 10]], "skipped": [[4, 10]]}, EVERYTHING[1]]
WITH_HOLES = [EVERYTHING[0], {"epoch": 1, "applied": [[0, 4], [8, 10]], "skipped": []}]


@pytest.mark.parametrize(
    ("shards", "said"),
    [
        ((EVERYTHING, EVERYTHING), {"counted": 6, "missing_batches": []}),
        (
            (EVERYTHING, WITH_HOLES),
            {"counted": 5, "missing_batches": ["epoch 2 positions 4..7"]},
        ),
        ((EVERYTHING, EVERYTHING[:1]), {"counted": 3}),
        (
            (SKIPPED, SKIPPED),
            {"skipped_batches": ["epoch 1 positions 4..7", "epoch 1 positions 8..9"]},
        ),
    ],
)
def test_whether_every_batch_has_counted_is_read_off_what_the_shards_have_applied(
    tmp_path: Path, shards: tuple[list[dict[str, Any]], ...], said: dict[str, Any]
) -> None:
    run = replace(make_run(tmp_path, shards=2), counted_twice=1)
    write_applied(run, 4, list(shards))
    found = read_counted(run, "checkpoints/step-00000004")
    assert found is not None
    assert (found["batches"], found["twice"]) == (6, 1)
    assert found["skipped"] == len(found["skipped_batches"])
    assert {key: found[key] for key in said} == said


def test_nothing_is_said_of_a_checkpoint_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, 100)
    for name in ("", "checkpoints/step-00000100", "checkpoints/step-00000200"):
        assert read_counted(make_run(tmp_path), name) is None


def test_only_what_was_never_finished_is_removed(tmp_path: Path) -> None:
    whole = write(tmp_path, 100)
    (tmp_path / "checkpoints" / ".tmp-step-00000200").mkdir()
    remove_unfinished(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == [whole]
    assert choose_checkpoint(tmp_path, job()).restored.global_step == 100


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot resume: no good checkpoint"):
        choose_checkpoint(tmp_path, job())


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


class Space(Disk):
    """A disk that says itself how much is free, and may refuse to remove anything."""

    def __init__(self, free: int = 1 << 30, stuck: bool = False) -> None:
        self._free = free
        self._stuck = stuck

    def free(self, path: Path) -> int:
        return self._free

    def remove(self, directory: Path) -> None:
        if self._stuck:
            raise OSError(errno.EIO, "Input/output error")
        super().remove(directory)


def test_a_checkpoint_that_would_fill_the_disk_is_not_begun(tmp_path: Path) -> None:
    # 72 float32 parameters.
    for free, fits in ((64 * 1024 + 288, True), (64 * 1024 + 287, False)):
        checkpoints = Checkpoints(make_run(tmp_path), Space(free))
        order = SnapshotOrder(f"s{free}", 1, True, False, f"checkpoints/.tmp-s{free}")
        if fits:
            checkpoints.prepare(order)
        else:
            with pytest.raises(CheckpointError, match=r"65823 bytes are free; .*takes about 288"):
                checkpoints.prepare(order)
        assert (tmp_path / order.directory).exists() == fits


def test_the_newest_stay_and_the_best_of_those_that_were_evaluated(tmp_path: Path) -> None:
    run = make_run(tmp_path, keep_checkpoints=2, keep_best={"metric": "loss", "lower": True})
    checkpoints = Checkpoints(run)
    scores = {(1, 10): 0.5, (1, 20): 0.25, (1, 30): 0.75}
    for step in (10, 20, 30, 40, 50, 60):
        commit(checkpoints, tmp_path, step)
        assert checkpoints.retain(scores, in_use=["step-00000030"]) == ()
    assert names(tmp_path) == [f"step-{step:08d}" for step in (20, 30, 50, 60)]
    assert checkpoints.retain({(1, 50): 0.125}) == ()
    assert names(tmp_path) == ["step-00000050", "step-00000060"]


def test_nothing_is_removed_before_the_newest_has_been_read_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(make_run(tmp_path, keep_checkpoints=1))
    old = commit(checkpoints, tmp_path, 10)
    damaged = commit(checkpoints, tmp_path, 20)
    (damaged / "a").write_bytes(b"abd")
    warnings = checkpoints.retain({})
    assert len(warnings) == 1
    assert "a checkpoint is damaged" in warnings[0]
    assert old.is_dir()
    assert checkpoints.retain({}) == ()
    (old / "a").write_bytes(b"abd")
    assert checkpoints.retain({}) == ()  # it was good when it was read
    assert Checkpoints(make_run(tmp_path, keep_checkpoints=1)).retain({})[-1] == (
        "no checkpoint is good, and none is removed"
    )
    commit(checkpoints, tmp_path, 30)
    assert checkpoints.retain({}) == ()
    assert names(tmp_path) == ["step-00000030"]


def test_a_failed_removal_is_a_warning_and_repeated_at_the_next_start(tmp_path: Path) -> None:
    checkpoints = Checkpoints(make_run(tmp_path, keep_checkpoints=1), Space(stuck=True))
    for step in (10, 20):
        commit(checkpoints, tmp_path, step)
    (warning,) = checkpoints.retain({})
    assert "step-00000010 cannot be removed: Input/output error" in warning
    assert choose_checkpoint(tmp_path, job()).remarks == ()
    remove_unfinished(tmp_path)
    assert names(tmp_path) == ["step-00000020"]


def copied(tmp_path: Path, **changes: Any) -> Run:
    """A run with checkpoint step-00000004 of two shards and its copy, whose manifest has other
    values."""
    run = make_run(tmp_path, shards=2)
    write_applied(run, 4, APART, slots=("momentums",))
    original = tmp_path / "checkpoints" / "step-00000004"
    name = write_changed_copy(original, lambda _shard, state: state)
    if changes:
        directory = original.with_name(name)
        manifest = replace(read_manifest(directory), **changes)
        (directory / MANIFEST).write_bytes(manifest.to_json())
    return run


def test_a_changed_copy_is_what_a_run_goes_on_from(tmp_path: Path) -> None:
    run, lasting = copied(tmp_path), set[str]()
    chosen = check_changed_copy(run, "step-00000004.set", "step-00000004", lasting=lasting)
    assert chosen.restored == RestoredCheckpoint("step-00000004.set", 4)
    assert lasting == {"step-00000004.set"}
    assert newest_good(tmp_path / "checkpoints").manifest.name == "step-00000004.set"
    # It may have been restored already.
    assert check_changed_copy(run, "step-00000004.set", "step-00000004.set") == chosen


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_step": 5}, "has global_step 5, and step-00000004 has 4"),
        ({"generation": 2}, "has generation 2, and step-00000004 has 1"),
        ({"policy": 7}, "has policy 7, and"),
        ({"run_id": "other"}, "is of run other; expected r1"),
    ],
)
def test_a_copy_that_differs_in_more_than_its_values_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    run = copied(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        check_changed_copy(run, "step-00000004.set", "step-00000004")


def test_a_copy_with_other_batches_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, shards=2)
    write_applied(run, 4, APART)
    original = tmp_path / "checkpoints" / "step-00000004"

    def change(_shard: int, state: ShardState) -> ShardState:
        return replace(state, applied=[{"epoch": 0, "applied": [[0, 4]], "skipped": []}])

    name = write_changed_copy(original, change)
    with pytest.raises(CheckpointError, match=r"has applied .*, and step-00000004 has"):
        check_changed_copy(run, name, original.name)


def test_a_copy_without_the_slots_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, shards=2)
    write_applied(run, 4, APART, slots=("momentums",))
    original = tmp_path / "checkpoints" / "step-00000004"
    name = write_changed_copy(original, lambda _shard, state: replace(state, elements={}))
    with pytest.raises(CheckpointError, match=r"has slots \['iterations'\], and step-00000004 has"):
        check_changed_copy(run, name, original.name)
