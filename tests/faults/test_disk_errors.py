"""Operations that the disk refuses: that attempt fails, it is never tried again, the next one has
files of its own."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.checkpoints.checkpoints import Checkpoints
from coordinator.records.store import Store
from psrpc.checkpoint.checkpoint import newest_good
from psrpc.core.errors import CheckpointError
from tests.coordinator.builders import make_run
from tests.faults.disks import fill, mounted_disk
from tests.faults.scenarios import LEDGER, SHARDS, STEPS, decision, save
from tests.faults.strace import Call, Zygote, needs_strace

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as started:
        yield started


@slow
@needs_strace
@pytest.mark.parametrize(
    ("name", "error", "words"),
    [("fsync", "EIO", "Input/output error"), ("write", "ENOSPC", "No space left on device")],
)
def test_an_attempt_that_fails_is_not_tried_again(
    zygote: Zygote, tmp_path: Path, name: str, error: str, words: str
) -> None:
    whole = zygote.run("checkpoints", tmp_path / "whole")
    points = [c for c in whole.calls_on(tmp_path / "whole") if c.name == name]
    assert len(points) > 5 * len(STEPS)
    failures = 0
    for index, call in enumerate(points):
        run_dir = tmp_path / f"{index}"
        outcome = zygote.run("checkpoints", run_dir, f"{name}:error={error}:when={call.number}")
        assert outcome.status == 0, outcome.words
        (failed,) = (c for c in outcome.calls if c.failed and "(INJECTED)" in c.text)
        assert_not_touched_again(failed, outcome.calls)
        assert_space_is_given_back(run_dir, failed)
        said = [word for word in outcome.words if word.startswith(("failed", "warning"))]
        assert len(said) == 1, outcome.words
        assert words in said[0]
        committed = [word for word in outcome.words if word.startswith("committed")]
        if said[0].startswith("failed"):
            failures += 1
            assert len(committed) == len(STEPS) - 1
        choice = newest_good(run_dir / "checkpoints")
        assert choice.manifest.global_step >= len(STEPS) - 1
        assert choice.refused == ()
    assert failures > 4 * len(STEPS)


def path_of(call: Call) -> str:
    found = re.search(r"\(\d+<([^>]*)>", call.text)
    assert found, call.text
    return found[1]


def assert_not_touched_again(failed: Call, calls: tuple[Call, ...]) -> None:
    path = path_of(failed)
    after = calls[calls.index(failed) + 1 :]
    if Path(path).suffix:
        # A file, which has to be removed with its directory and is not written or synced again.
        again = [c.text for c in after if c.name in ("write", "fsync") and path_of(c) == path]
        assert not again


def assert_space_is_given_back(run_dir: Path, failed: Call) -> None:
    left = [p for p in (run_dir / "checkpoints").iterdir() if p.name.startswith(".tmp-")]
    # What has lost its name and could not be removed goes at the next start.
    assert all(path.name.endswith(".removed") for path in left), failed.text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    with mounted_disk(tmp_path / "disk", megabytes=1) as path:
        yield path


@slow
def test_a_full_disk_stops_checkpoints_and_nothing_else(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.records.ledger_file.RESERVED_BYTES", 64 << 10)
    monkeypatch.setattr("coordinator.records.ledger_file.LOG_PAGES", 8)
    run = make_run(small_disk, shards=SHARDS, generation=1, keep_checkpoints=2)
    made = Checkpoints(run)
    with Store(small_disk / LEDGER) as store:
        save(made, small_disk, run.plan, 1, 1)
        # It sees that a checkpoint would leave too little, and begins none.
        filler = fill(small_disk, 64 << 10)
        with pytest.raises(CheckpointError, match=r"no space for .*step-00000002: \d+ bytes are"):
            save(made, small_disk, run.plan, 2, 1)
        # It is full before the shards have written: others have done that.
        filler.unlink()
        filler = fill(small_disk, 4 << 10)
        monkeypatch.setattr("coordinator.checkpoints.checkpoints.RESERVE_NBYTES", 0)
        with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)):
            save(made, small_disk, run.plan, 3, 1)
        fill(small_disk, 0)
        # The ledger has its own space.
        for number in range(50):
            store.put_decision(decision(1, number))
        assert store.last_decision(1) == decision(1, 49)
        assert newest_good(small_disk / "checkpoints").refused == ()
        filler.unlink()
        save(made, small_disk, run.plan, 4, 1)
        assert newest_good(small_disk / "checkpoints").manifest.global_step == 4
        assert not list((small_disk / "checkpoints").glob(".tmp-*"))
