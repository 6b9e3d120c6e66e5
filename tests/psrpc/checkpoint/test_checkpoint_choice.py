"""Which checkpoint is good, and how it becomes so: nothing torn or changed is loaded."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest

from psrpc.checkpoint.checkpoint import (
    ManifestFile,
    commit,
    newest_good,
    read_manifest,
    shard_file_name,
    verify,
    write_shard_file,
)
from psrpc.checkpoint.choice import find_checkpoints
from psrpc.checkpoint.directory import remove_checkpoint
from psrpc.checkpoint.load import load_state
from psrpc.core.errors import CheckpointError
from psrpc.core.placement import make_plan
from psrpc.files.storage import Disk
from tests.psrpc.builders import VARIABLES, assert_state, manifest_of, plan_of, state_of, write


class CountingDisk(Disk):
    """Counts the bytes of shards' files that are read."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def open(self, path: Path) -> io.BufferedIOBase:
        self.opened.append(path.name)
        return super().open(path)


def test_a_shard_reads_its_own_file_and_reads_it_once(tmp_path: Path) -> None:
    plan = plan_of(3)
    directory = write(tmp_path, plan)
    damaged = directory / shard_file_name(2, 3)
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    disk = CountingDisk()
    assert_state(load_state(directory, plan, 1, storage=disk), state_of(plan, 1))
    assert disk.opened == ["manifest.json", "shard-1-of-3.safetensors"]
    with pytest.raises(CheckpointError, match="shard-2-of-3"):
        load_state(directory, plan, 2)
    with pytest.raises(CheckpointError, match="shard-2-of-3"):
        load_state(directory, plan_of(2), 0)


def test_a_checkpoint_of_another_run_is_passed_over(tmp_path: Path) -> None:
    directory = write(tmp_path, plan_of(1))
    assert newest_good(tmp_path, "run-1").directory == directory
    with pytest.raises(CheckpointError, match="is of run run-1; expected run-2"):
        newest_good(tmp_path, "run-2")


def test_nothing_is_written_over(tmp_path: Path) -> None:
    directory = write(tmp_path, plan_of(1))
    before = read_manifest(directory)
    with pytest.raises(CheckpointError, match="cannot be committed: Directory not empty"):
        write(tmp_path, plan_of(1))
    assert newest_good(tmp_path).manifest == before
    with pytest.raises(CheckpointError, match="File exists"):
        write_shard_file(
            directory / before.files[0].name,
            plan_of(1),
            0,
            state_of(plan_of(1), 0),
            run_id="r",
            generation=1,
            global_step=0,
        )
    verify(directory, before)


def test_a_checkpoint_loses_its_name_before_its_files(tmp_path: Path) -> None:
    old, new = (write(tmp_path, plan_of(1), step=step) for step in (5, 6))

    class Stuck(Disk):
        def remove(self, directory: Path) -> None:
            raise OSError(5, "Input/output error")

    with pytest.raises(CheckpointError, match=r"step-00000005 cannot be removed: Input/output"):
        remove_checkpoint(old, Stuck())
    assert [d for d, _ in find_checkpoints(tmp_path).manifests] == [new]
    assert find_checkpoints(tmp_path).refused == ()
    remove_checkpoint(new)
    assert find_checkpoints(tmp_path).manifests == ()


def test_a_later_generation_is_newer_whatever_its_step(tmp_path: Path) -> None:
    plan = plan_of(1)
    write(tmp_path, plan, step=20)
    later = write(tmp_path, plan, step=10, generation=2)
    assert newest_good(tmp_path).directory == later


def test_no_good_checkpoint_is_an_error_with_every_reason(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no good checkpoint in {tmp_path}"):
        newest_good(tmp_path)
    directory = write(tmp_path, plan_of(1))
    (directory / "shard-0-of-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard-0-of-1.safetensors cannot be read"):
        newest_good(tmp_path)


def test_other_variables_are_refused_by_name(tmp_path: Path) -> None:
    directory = write(tmp_path, plan_of(1))
    wider = (replace(VARIABLES[0], shape=(7, 10)), *VARIABLES[1:])
    with pytest.raises(
        CheckpointError, match=r"'dense/kernel' as .*\[7, 9\]; the job has .*\[7, 10\]"
    ):
        load_state(directory, make_plan(wider, 1, "cut"), 0)
    with pytest.raises(CheckpointError, match=r"'scale' as .*; the job has it as none"):
        load_state(directory, make_plan(VARIABLES[:2] + VARIABLES[3:], 1, "cut"), 0)


def test_files_and_names_are_synced_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that makes a crash at any point harmless, see DESIGN §8."""
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(handle: int) -> None:
        events.append(f"fsync {Path(f'/proc/self/fd/{handle}').readlink().name}")
        real_fsync(handle)

    def rename(self: Path, target: Path) -> Path:
        events.append(f"rename {self.name} {target.name}")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    root = tmp_path / "checkpoints"
    write(root, plan_of(1))
    assert events == [
        "fsync shard-0-of-1.safetensors",
        "fsync .tmp-5",
        "fsync manifest.json",
        "fsync .tmp-5",
        "rename .tmp-5 step-00000005",
        "fsync checkpoints",
    ]


def test_an_error_of_the_disk_is_a_checkpoint_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=r"shard-0.*Input/output error"):
        write(tmp_path, plan_of(1))
    with pytest.raises(CheckpointError, match="No such file"):
        write_shard_file(
            tmp_path / "gone" / "x",
            plan_of(1),
            0,
            state_of(plan_of(1), 0),
            run_id="r",
            generation=1,
            global_step=0,
        )


def test_a_commit_without_all_its_files_is_refused(tmp_path: Path) -> None:
    temporary = tmp_path / ".tmp-step"
    temporary.mkdir()
    manifest = manifest_of(plan_of(1), (ManifestFile(0, "shard-0-of-1.safetensors", 9, "00", 0),))
    with pytest.raises(CheckpointError, match=r"No such file or directory: .*shard-0-of-1"):
        commit(temporary, tmp_path / "step", manifest)
    assert not (tmp_path / "step").exists()
