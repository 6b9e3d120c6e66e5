"""A checkpoint counts only where a power cut leaves its name: on a disk that refuses fsyncs of the
directory, and takes what was changed for written from then on."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.checkpoints import disk
from coordinator.checkpoints.checkpoints import Checkpoints, remove_unfinished
from coordinator.checkpoints.snapshots import Taken, checkpoint_name, temporary_directory
from coordinator.core.run import Run
from coordinator.process.options import ServeOptions
from coordinator.process.settling import settle
from coordinator.records.run_directory import RunDirectory
from coordinator.records.store import Store
from psrpc.checkpoint.choice import find_checkpoints
from psrpc.core.commands import SnapshotOrder
from psrpc.core.names import CHECKPOINTS
from psrpc.core.shard_reports import ShardFile
from psrpc.files.durable import RENAMED, ensure_directory, make_directory
from tests.coordinator.builders import make_run
from tests.sim.disk import Disk, View
from tests.sim.faults import Faults
from tests.sim.schedule import Process, Schedule

RUN_DIR = Path("/sim/run")
HERE = RUN_DIR / CHECKPOINTS


class Refusing(View):
    """The simulator's disk. ``refused`` counts down the next fsyncs of ``refuses`` that fail,
    ``stuck`` refuses to rename anything from the first of them on, ``refuse_renames`` at once."""

    def __init__(self) -> None:
        schedule = Schedule(1)
        self.disk = Disk(schedule.random, Faults(schedule.random, {}, schedule.now))
        super().__init__(self.disk, Process(schedule, "coordinator", 1))
        self.refuses = HERE
        self.refused = 0
        self.stuck = False
        self.refuse_renames = False
        self.failed = 0

    def sync(self, directory: Path) -> None:
        if directory == self.refuses and self.refused:
            self.refused -= 1
            self.failed += 1
            self.disk.directory(directory).fail_to_sync()
            raise OSError(errno.EIO, "Input/output error", str(directory))
        super().sync(directory)

    def rename(self, old: Path, new: Path) -> None:
        if self.refuse_renames or (self.stuck and self.failed):
            raise OSError(errno.EIO, "Input/output error", str(old))
        super().rename(old, new)

    def cut_power(self) -> None:
        self.disk.lose({"coordinator", "shard"})

    @property
    def names(self) -> list[str]:
        return self.directories(HERE)


def save(
    run: Run,
    step: int,
    storage: Refusing,
    checkpoints: Checkpoints | None = None,
    refused: int = 0,
    stuck: bool = False,
    generation: int = 1,
) -> str:
    """Orders, writes and commits a checkpoint; why it failed, or nothing. The disk is as it is
    told to be while it is committed."""
    name = checkpoint_name(step, generation)
    order = SnapshotOrder(name, step, write=True, directory=temporary_directory(name))
    checkpoints = checkpoints or Checkpoints(run, storage)
    checkpoints.prepare(order)
    storage.write(RUN_DIR / order.directory / "a", [b"abc"])
    file = ShardFile(0, step, "a", 3, hashlib.sha256(b"abc").hexdigest())
    storage.refused, storage.stuck = refused, stuck
    committed = disk.commit_checkpoint(checkpoints, Taken(order, (file,)), generation, {}, ())
    storage.stuck = False
    if committed.error:
        checkpoints.discard(order)
    return committed.error


@pytest.fixture
def storage() -> Refusing:
    return Refusing()


@pytest.fixture
def run() -> Run:
    return make_run(RUN_DIR, keep_checkpoints=1)


def test_a_commit_whose_name_may_not_last_leaves_no_name(run: Run, storage: Refusing) -> None:
    assert save(run, 1, storage) == ""
    assert "cannot be committed" in save(run, 2, storage, refused=1)
    assert storage.failed == 1
    assert storage.names == ["step-00000001"]


def test_a_name_that_stayed_is_chosen_only_once_it_lasts(run: Run, storage: Refusing) -> None:
    """It could not be taken away, and another coordinator finds it."""
    assert save(run, 1, storage, refused=1, stuck=True)
    assert storage.names == ["step-00000001"]
    assert storage.disk.lacking(HERE / "step-00000001")
    choice = disk.choose(run, {}, storage)
    assert choice.chosen is not None
    assert storage.disk.lacking(HERE / "step-00000001") == ""
    storage.cut_power()
    assert storage.names == ["step-00000001"]


def test_a_name_that_cannot_be_made_to_last_is_not_chosen(run: Run, storage: Refusing) -> None:
    assert save(run, 1, storage) == ""
    storage.refused = 1
    refused = disk.choose(run, {}, storage)
    assert (refused.chosen, refused.again) == (None, True)
    assert "Input/output error" in refused.reason
    again = disk.choose(run, {}, storage)
    assert again.chosen is not None
    assert storage.disk.lacking(HERE / "step-00000001") == ""


def resumed(run: Run, storage: Refusing, tmp_path: Path) -> Run:
    """The run as ``--resume`` settles it, with a ledger in ``tmp_path``, which may be new."""
    options = ServeOptions(job=tmp_path / "tiny.py", shards=1, resumption="always")
    options.job.touch()
    directory = RunDirectory(tmp_path, resume=True)
    directory.path = RUN_DIR
    with pytest.MonkeyPatch.context() as patch, Store(tmp_path / "ledger.sqlite") as store:
        patch.setattr(RunDirectory, "write_job", lambda *_: None)
        patch.setattr(RunDirectory, "new_token", lambda _: "secret")
        return settle(options, run.description, run.plan, directory, store, storage)


def test_a_run_that_is_resumed_goes_on_from_a_name_that_lasts(
    run: Run, storage: Refusing, tmp_path: Path
) -> None:
    assert save(run, 1, storage, refused=1, stuck=True)
    storage.refused = 1
    with pytest.raises(OSError, match="Input/output error"):
        resumed(run, storage, tmp_path)
    assert resumed(run, storage, tmp_path).run_id == run.run_id
    assert storage.disk.lacking(HERE / "step-00000001") == ""


def test_a_run_with_a_new_ledger_goes_on_above_all_generations_of_its_checkpoints(
    run: Run, storage: Refusing, tmp_path: Path
) -> None:
    """Otherwise what it saves from now on counts as older than what it began with."""
    both = make_run(RUN_DIR, keep_checkpoints=2)
    assert save(both, 1, storage) == save(both, 2, storage, generation=4) == ""
    assert resumed(run, storage, tmp_path).generation == 4


@pytest.mark.parametrize("how", ["start", "choice"])
def test_a_name_that_was_being_given_anew_is_given_back(
    run: Run, storage: Refusing, how: str
) -> None:
    """The process ended in between."""
    assert save(run, 1, storage) == ""
    storage.rename(HERE / "step-00000001", HERE / f"{RENAMED}step-00000001")
    storage.sync(HERE)
    # Others who look meanwhile do not take an older one in silence.
    [(path, why)] = find_checkpoints(HERE, storage).refused
    assert path.name == f"{RENAMED}step-00000001"
    assert "giving it its name anew" in why
    if how == "start":
        remove_unfinished(RUN_DIR, storage)
        assert storage.names == ["step-00000001"]
    choice = disk.choose(run, {}, storage)
    assert choice.chosen is not None
    assert storage.disk.lacking(HERE / "step-00000001") == ""


class AtOnce(disk.DiskWork):
    """Does its work where it is asked to."""

    def begin(self, work: Callable[[], disk.Result], done: Callable[[disk.Result], None]) -> None:
        done(work())
        self.over()


def test_a_checkpoint_that_shards_may_be_reading_keeps_its_name(
    run: Run, storage: Refusing
) -> None:
    """One shard reads it while it is chosen again for another that was lost: were it missed for a
    moment, the shard would refuse it, and the run go on from an older one."""
    assert save(run, 1, storage) == ""
    work = AtOnce(run, storage)
    choices: list[disk.DiskChoice] = []
    storage.refused = 1
    work.choose({}, choices.append)
    assert choices.pop().again, "it does not last yet"
    work.choose({}, choices.append)
    storage.refuse_renames = True
    work.choose({}, choices.append)
    assert [choice.reason for choice in choices] == ["", ""]
    assert [choice.chosen is not None for choice in choices] == [True, True]
    assert storage.disk.lacking(HERE / "step-00000001") == ""


def test_no_checkpoint_goes_before_the_newest_good_one_lasts(run: Run, storage: Refusing) -> None:
    checkpoints = Checkpoints(run, storage)
    assert save(run, 1, storage, checkpoints) == ""
    assert save(run, 2, storage, checkpoints, refused=1, stuck=True)
    storage.refused = 1
    (warning,) = checkpoints.retain({})
    assert warning.startswith("old checkpoints stay: a power cut may take")
    assert storage.names == ["step-00000001", "step-00000002"]
    assert checkpoints.retain({}) == ()
    assert storage.names == ["step-00000002"]
    storage.cut_power()
    assert "step-00000002" in storage.names


def test_a_disk_begins_with_nothing_and_the_run_directory_and_all_above_it_last(
    run: Run, storage: Refusing
) -> None:
    assert storage.disk.root.names == {}
    ensure_directory(RUN_DIR, storage)
    storage.cut_power()
    assert storage.directories(RUN_DIR.parent) == [RUN_DIR.name]
    assert save(run, 1, storage) == ""
    storage.cut_power()
    assert storage.names == ["step-00000001"]


@pytest.mark.parametrize("level", [RUN_DIR, RUN_DIR.parent, RUN_DIR.parent.parent])
def test_a_directory_whose_name_may_not_last_gets_it_anew(storage: Refusing, level: Path) -> None:
    """Its sync has failed, or the process has died before it."""
    storage.refuses, storage.refused = level, 1
    with pytest.raises(OSError, match="Input/output error"):
        make_directory(HERE, storage)
    assert storage.failed == 1
    ensure_directory(HERE, storage)
    storage.cut_power()
    assert storage.directories(RUN_DIR) == [CHECKPOINTS]


@pytest.mark.parametrize("there", [False, True])
def test_a_run_directory_is_synced_with_those_made_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    (tmp_path / "job.py").touch()
    path = tmp_path / "runs" / "mine"
    if there:
        path.mkdir(parents=True)
        path.chmod(0o750)
    synced: list[str] = []

    def sync(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink().name)

    monkeypatch.setattr(os, "fsync", sync)
    for _ in range(2):
        with RunDirectory(path, resume=False):
            assert path.is_dir()
    if there:
        assert synced == ["runs"]
        assert path.stat().st_mode & 0o777 == 0o750
    else:
        assert synced == [tmp_path.name, "runs"]
