"""Evicted rows of a run: kept when checkpoints go, and exported with all that is behind a state."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from coordinator.checkpoints.evicted import is_behind, keep_evicted
from coordinator.checkpoints.pruning import Pruner
from coordinator.cli import export as export_cli
from coordinator.cli.checkpoint import run as run_checkpoint
from coordinator.cli.checkpoint_options import add_arguments as add_checkpoint_arguments
from coordinator.export import export
from coordinator.export.checkpoint_diff import diff_checkpoints
from coordinator.records.run_directory import LEDGER
from coordinator.records.store import Store
from coordinator.records.stored_values import RESTORED, RestoredGeneration
from psrpc.checkpoint.choice import find_checkpoints
from psrpc.core.errors import CheckpointError
from psrpc.core.tables import shard_of
from psrpc.files.storage import Disk
from tests.pserver.snapshots.test_evicted_files import job_of, touch
from tests.pserver.table_shards import Job


def run_of(root: Path, restored: Sequence[RestoredGeneration] = (), shards: int = 1) -> Job:
    job = job_of(root / "run", shards=shards)
    job.root.mkdir()
    with Store(job.root / LEDGER) as store:
        store.put(RESTORED, restored)
    return job


def export_run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    export_cli.add_arguments(parser)
    return export.run(parser.parse_args([str(argument) for argument in arguments]))


def checkpoint_run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_checkpoint_arguments(parser)
    return run_checkpoint(parser.parse_args([str(argument) for argument in arguments]))


def exported(job: Job, to: Path, *more: object) -> list[int]:
    """The ids of all evicted rows, as a person gets them."""
    assert export_run(job.root, "--evicted", to, *more) == 0
    found = load_file(to / "item.safetensors")
    assert found["rows"].shape == (found["ids"].size, 2)
    ids: list[int] = found["ids"].tolist()
    return ids


def prune(job: Job, keep: int = 1, storage: Disk | None = None) -> tuple[str, ...]:
    return Pruner(job.root / "checkpoints", keep, None, storage or Disk()).prune({})


def test_all_that_was_evicted_also_of_checkpoints_that_are_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = run_of(tmp_path)
    base, names = "", []
    for stop in (6, 8, 8, 9):
        touch(job, stop - 6, stop)
        names.append(base := job.checkpoint(base))
    whole = exported(job, tmp_path / "before")
    assert whole == list(range(8))
    assert not prune(job)
    kept = {path.name for path, _ in find_checkpoints(job.root / "evicted").manifests}
    assert kept == {Path(name).name for name in names[:3]}
    assert exported(job, tmp_path / "after") == whole
    np.testing.assert_array_equal(
        *(load_file(tmp_path / d / "item.safetensors")["rows"] for d in ("before", "after"))
    )
    said = capsys.readouterr().err
    step = f"(step {job.version})"
    assert (
        f"{tmp_path}/after/item.safetensors from {job.root / names[-1]} {step}: 8 evicted" in said
    )
    # From the checkpoint alone, and both kinds at once.
    both = ("--evicted", tmp_path / "both" / "evicted", "--tables", tmp_path / "both" / "tables")
    assert export_run(job.root / names[-1], *both) == 0
    assert sorted(path.name for path in (tmp_path / "both" / "evicted").iterdir()) == [
        "item.safetensors"  # the other table keeps none
    ]


def test_an_earlier_state_has_less_behind_it(tmp_path: Path) -> None:
    job = run_of(tmp_path)
    touch(job, 0, 5)
    first = job.checkpoint()
    step = job.version
    touch(job, 5, 7)
    job.checkpoint(first)
    assert exported(job, tmp_path / "all") == [0, 1, 2]
    assert exported(job, tmp_path / "first", "--step", step) == [0]


def test_rows_that_a_restart_rolled_back_are_not_exported(tmp_path: Path) -> None:
    job = run_of(tmp_path, [RestoredGeneration(2, 1, 5)])
    touch(job, 0, 5)
    first = job.checkpoint()
    assert job.version == 5
    touch(job, 5, 7)
    job.checkpoint(first)
    (job.held[0],) = job.restored(first, 1)
    job.generation, job.version = 2, 20
    touch(job, 0, 1)  # is there again, in the place of the oldest
    job.checkpoint()
    assert exported(job, tmp_path / "out") == [0, 1]
    assert exported(job, tmp_path / "then", "--step", 7) == [0, 1, 2]
    assert not prune(job)
    assert exported(job, tmp_path / "out") == [0, 1]


def test_shards_that_kept_what_they_held_have_it_behind_them(tmp_path: Path) -> None:
    """Asynchronous: the newest checkpoint is damaged, and only shard 1 needs one."""
    job = run_of(tmp_path, [RestoredGeneration(2, 1, 6, [0])], shards=2)
    ids = [np.flatnonzero(shard_of(np.arange(100), 2) == shard).tolist() for shard in (0, 1)]

    def touch_all(first: int, stop: int) -> None:
        """By turns, so that what a shard does is not the other's."""
        for shard in (0, 1):
            for id_ in ids[shard][first:stop]:
                touch(job, id_, id_ + 1, shard)

    touch_all(0, 3)  # there is room for two on each
    first = job.checkpoint()
    assert job.version == 6
    touch_all(3, 4)
    damaged = job.checkpoint(first)
    touch_all(4, 5)
    job.report(damaged)  # begun, so that no process keeps the damaged one's rows
    _, job.held[1] = job.restored(first, 2)
    job.generation, job.version = 2, 20
    touch_all(5, 6)
    job.checkpoint()
    # Of shard 0 the first four, in the order in which they came; shard 1 never evicted its third.
    assert exported(job, tmp_path / "out") == sorted([*ids[0][:4], *ids[1][:2]])


@pytest.mark.parametrize(
    ("one", "other", "behind"),
    [
        ((1, 10), (1, 10), True),
        ((1, 10), (1, 20), True),
        ((1, 20), (1, 10), False),
        ((1, 20), (2, 30), True),
        ((1, 21), (2, 30), False),  # 2 went on from (1, 20)
        ((1, 21), (1, 30), True),
        ((2, 25), (3, 40), True),  # 3 kept all
        ((1, 21), (3, 40), False),
        ((1, 15), (4, 50), True),
        ((1, 16), (4, 50), False),  # 4 went on from (1, 15)
        ((2, 25), (4, 50), False),
        ((4, 20), (4, 50), True),
    ],
)
def test_states_that_lie_behind_another(
    one: tuple[int, int], other: tuple[int, int], behind: bool
) -> None:
    restored = [RestoredGeneration(2, 1, 20, [1]), RestoredGeneration(4, 1, 15, [1, 2])]
    assert is_behind(one, other, 0, restored) == behind
    assert is_behind(one, other, 1, restored) == (one <= other)


class Refusing(Disk):
    """A disk that does not rename what is kept."""

    refuses = True

    def rename(self, old: Path, new: Path) -> None:
        if self.refuses and new.parent.name == "evicted":
            raise OSError(5, "Input/output error")
        super().rename(old, new)


def test_a_checkpoint_stays_until_its_evicted_rows_are_kept(tmp_path: Path) -> None:
    job, disk = run_of(tmp_path), Refusing()
    touch(job, 0, 5)
    first = job.checkpoint()
    touch(job, 5, 6)
    job.checkpoint(first)
    (warning,) = prune(job, storage=disk)
    assert "evicted rows of " in warning
    assert warning.endswith("Input/output error")
    assert (job.root / first).is_dir()
    assert list((job.root / "evicted").iterdir()) == []
    disk.refuses = False
    keep_evicted(job.root / first, disk)  # and who was to remove it dies
    assert exported(job, tmp_path / "between") == [0, 1]
    assert prune(job, storage=disk) == ()
    assert not (job.root / first).exists()
    assert exported(job, tmp_path / "after") == [0, 1]


def test_kept_rows_whose_name_may_not_last_are_given_it_anew(tmp_path: Path) -> None:
    class Syncs(Refusing):
        refuses = False
        fails = True

        def __init__(self) -> None:
            self.renamed: list[str] = []

        def rename(self, old: Path, new: Path) -> None:
            self.renamed.append(new.name)
            super().rename(old, new)

        def sync(self, directory: Path) -> None:
            if self.fails and directory.name == "evicted" and list(directory.glob("step-*")):
                raise OSError(5, "Input/output error")
            super().sync(directory)

    job, disk = run_of(tmp_path), Syncs()
    touch(job, 0, 5)
    first = job.checkpoint()
    touch(job, 5, 6)
    job.checkpoint(first)
    name = Path(first).name
    (warning,) = prune(job, storage=disk)
    assert "Input/output error" in warning
    assert (job.root / first).exists()
    assert disk.renamed[-2:] == [name, f".tmp-{name}"]
    disk.fails = False
    for renamed in ([name], [f".renamed-{name}", name]):
        # The second time the removing process may have died before the fsync.
        disk.renamed = []
        keep_evicted(job.root / first, disk)
        assert disk.renamed == renamed
    assert prune(job, storage=disk) == ()
    assert exported(job, tmp_path / "after") == [0, 1]


def test_damage_is_told_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = run_of(tmp_path)
    touch(job, 0, 5)
    first = job.checkpoint()
    touch(job, 5, 6)
    job.checkpoint(first)
    assert not prune(job)
    path = job.root / "evicted" / Path(first).name / "evicted-0-of-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert export_run(job.root, "--evicted", tmp_path / "out") == 2
    assert f"error PS401: {path} has SHA-256" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_tables_that_keep_nothing_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path / "run")
    job.train(3)
    job.checkpoint()
    assert export_run(job.root, "--evicted", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error PS110: --evicted {tmp_path}/out: {job.root}")
    assert "has no embedding table that keeps evicted rows; a job's tables do with" in said
    both = ("--evicted", tmp_path / "out", "--tables", tmp_path / "out")
    assert export_run(job.root, *both) == 2
    assert "are both" in capsys.readouterr().err


def test_without_a_ledger_evicted_rows_cannot_be_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(tmp_path)
    touch(job, 0, 5)
    job.checkpoint()
    assert export_run(job.root, "--evicted", tmp_path / "out") == 2
    assert "ledger.sqlite cannot be read" in capsys.readouterr().err


def test_checkpoint_commands_know_evicted_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = run_of(tmp_path)
    touch(job, 0, 6)
    first = job.checkpoint()
    touch(job, 6, 7)
    second = job.checkpoint(first)
    assert checkpoint_run("ls", job.root) == 0
    assert "item 4 (2 evicted)" in capsys.readouterr().out
    assert checkpoint_run("verify", job.root) == 0
    assert f"{Path(first).name}/evicted-0-of-1.safetensors  good" in capsys.readouterr().out
    found = diff_checkpoints(job.root / first, job.root / second)
    assert "evicted rows: {'item': 2} and {'item': 1}" in found.facts
    path = job.root / second / "evicted-0-of-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert checkpoint_run("verify", job.root) == 1
    assert f"{path.parent.name}/{path.name}  PS401: {path} has SHA-256" in capsys.readouterr().out
    with pytest.raises(CheckpointError):
        keep_evicted(job.root / "checkpoints" / "absent")
