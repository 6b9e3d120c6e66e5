"""The slow work on the disk: what it answers, and one piece at a time."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from coordinator.checkpoints.checkpoints import Checkpoints
from coordinator.checkpoints.disk import (
    DiskChoice,
    ThreadedDisk,
    WrittenManifest,
    choose,
    commit_checkpoint,
)
from coordinator.checkpoints.snapshots import Taken, temporary_directory
from coordinator.core.run import Run
from psrpc.core.commands import SnapshotOrder
from psrpc.core.names import CHECKPOINTS
from psrpc.core.shard_reports import ShardFile
from psrpc.files.storage import Disk
from tests.coordinator.builders import make_run


class Recorded(Disk):
    """The real disk; says in which directories it was asked to make names last, or refuses."""

    def __init__(self, refuses: bool = False) -> None:
        self.synced: list[str] = []
        self._refuses = refuses

    def sync(self, directory: Path) -> None:
        if self._refuses:
            raise OSError(errno.EIO, "Input/output error")
        self.synced.append(directory.name)
        super().sync(directory)


def taken(run: Run, step: int) -> Taken:
    """A checkpoint that its one shard has written."""
    name = f"step-{step:08d}"
    order = SnapshotOrder(name, step, write=True, directory=temporary_directory(name))
    Checkpoints(run).prepare(order)
    (run.run_dir / order.directory / "a").write_bytes(b"abc")
    digest = hashlib.sha256(b"abc").hexdigest()
    return Taken(order, (ShardFile(0, step, "a", 3, digest),))


def test_the_newest_good_checkpoint_is_chosen_and_its_name_made_to_last(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert choose(run, {}).chosen is None
    for step in (1, 2):
        assert commit_checkpoint(Checkpoints(run), taken(run, step), 1, {}, ()).error == ""
    storage = Recorded()
    choice = choose(run, {}, storage)
    assert choice.chosen is not None
    assert choice.chosen.restored.name == "step-00000002"
    assert storage.synced == [CHECKPOINTS]
    refused = choose(run, {}, Recorded(refuses=True))
    assert (refused.chosen, refused.seen, refused.again) == (None, False, True)
    older = choose(run, {"step-00000002": "a shard could not read it"})
    assert older.chosen is not None
    assert older.chosen.restored.name == "step-00000001"


def test_why_there_is_none_and_whether_there_were_any(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / CHECKPOINTS / ".tmp-step-00000000").mkdir(parents=True)
    assert not choose(run, {}).seen
    (tmp_path / CHECKPOINTS / "step-00000001").mkdir()
    nothing = choose(run, {})
    assert (nothing.chosen, nothing.seen, nothing.again) == (None, True, False)
    assert "no good checkpoint" in nothing.reason


def test_a_checkpoint_that_cannot_be_committed_says_why(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    torn = taken(run, 1)
    (tmp_path / torn.order.directory / "a").write_bytes(b"ab")
    assert "expected 3" in commit_checkpoint(Checkpoints(run), torn, 1, {}, ()).error


def test_work_is_done_on_a_thread_in_order_and_answered_on_the_loop(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    answers: list[WrittenManifest | DiskChoice] = []

    async def main() -> None:
        disk = ThreadedDisk(run, failed=pytest.fail)
        loops: list[Any] = []

        def answer(result: Any) -> None:
            loops.append(asyncio.get_running_loop())
            answers.append(result)

        for step in (1, 2):
            disk.commit(taken(run, step), 1, {}, (), answer)
        disk.choose({}, answer)
        assert answers == []
        await disk.close()
        assert loops == [asyncio.get_running_loop()] * 3

    asyncio.run(main())
    assert [type(answer) for answer in answers] == [WrittenManifest, WrittenManifest, DiskChoice]
    last = answers[-1]
    assert isinstance(last, DiskChoice)
    assert last.chosen is not None
    assert last.chosen.restored.name == "step-00000002"


def test_a_piece_of_work_has_its_turn_when_the_one_before_it_was_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint chosen during a commit could be removed, or not be the newest."""
    answers: list[WrittenManifest | DiskChoice] = []
    before: list[int] = []

    class Noting(threading.Thread):
        """Notes how many answers there were by the time that it was started."""

        def start(self) -> None:
            before.append(len(answers))
            super().start()

    monkeypatch.setattr("coordinator.checkpoints.disk.Thread", Noting)

    async def main() -> None:
        run = make_run(tmp_path)
        disk = ThreadedDisk(run, failed=pytest.fail)
        disk.commit(taken(run, 1), 1, {}, (), answers.append)
        disk.choose({}, answers.append)
        disk.commit(taken(run, 2), 1, {}, (), answers.append)
        await disk.close()

    asyncio.run(main())
    assert before == [0, 1, 2]
    assert len(answers) == 3


def test_storage_that_hangs_is_left_and_named_and_holds_up_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[DiskChoice] = []
    begun, goes_on = threading.Event(), threading.Event()

    def hang(*_: object) -> DiskChoice:
        begun.set()
        goes_on.wait()
        return DiskChoice(None)

    monkeypatch.setattr("coordinator.checkpoints.disk.choose", hang)
    monkeypatch.setattr("coordinator.checkpoints.disk.CLOSE_S", 0.0)

    async def main() -> None:
        disk = ThreadedDisk(make_run(tmp_path), failed=pytest.fail)
        disk.choose({}, answers.append)
        await asyncio.sleep(0)
        assert begun.wait(60)
        await disk.close()

    with structlog.testing.capture_logs() as logs:
        asyncio.run(main())  # whose end waits for no thread
    assert [(line["event"], line["waited_for"]) for line in logs] == [
        ("storage hangs, and is left", "the choice of the newest good checkpoint")
    ]
    assert answers == []
    goes_on.set()


@pytest.mark.parametrize("work", [commit_checkpoint, choose])
def test_unforeseen_errors_are_answered_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[..., Any]
) -> None:
    """Otherwise the job would wait for ever."""

    def fail(*_: object) -> None:
        raise RuntimeError("not foreseen")

    run = make_run(tmp_path)
    monkeypatch.setattr(Checkpoints, "commit", fail)
    monkeypatch.setattr("coordinator.checkpoints.disk.choose_checkpoint", fail)
    if work is commit_checkpoint:
        assert "not foreseen" in commit_checkpoint(Checkpoints(run), taken(run, 1), 1, {}, ()).error
    else:
        assert "not foreseen" in choose(run, {}).reason


@pytest.mark.parametrize("at_fault", ["work", "answer"])
def test_work_that_is_never_answered_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_fault: str
) -> None:
    run = make_run(tmp_path)
    failures: list[str] = []
    answers: list[DiskChoice] = []

    def fail(*_: object) -> Any:
        raise RuntimeError("not foreseen")

    async def main() -> None:
        disk = ThreadedDisk(run, failed=failures.append)
        with monkeypatch.context() as broken:
            if at_fault == "work":
                broken.setattr("coordinator.checkpoints.disk.choose", fail)
            disk.choose({}, fail if at_fault == "answer" else answers.append)
            await disk.close()
        # The next piece has its turn all the same.
        disk.choose({}, answers.append)
        await disk.close()

    asyncio.run(main())
    assert len(failures) == len(answers) == 1
    assert "not foreseen: RuntimeError('not foreseen')" in failures[0]
