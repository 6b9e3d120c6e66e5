"""The directory of a study: what it refuses, and what a killed process has left in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from coordinator.tune.directory import StudyDirectory, mend_journal, new_study_directory
from psrpc.core.errors import AlreadyExists, InvalidArgument

STUDY: dict[str, Any] = {
    "job": "mnist",
    "job_sha256": "ab",
    "space": {"rate": "log(0.1, 1.0)", "width": "integers(1, 2)"},
    "metric": "max:accuracy",
    "seed": 0,
    "mode": None,
    "overrides": ["epochs=3"],
}


def test_the_same_study_goes_on(tmp_path: Path) -> None:
    for known in (False, True, True):
        with StudyDirectory(tmp_path / "study") as directory:
            assert directory.settle(STUDY) is known
    assert directory.trial(7) == tmp_path / "study" / "trial-0007"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"job": "cifar"}, "is of the job mnist, and this is cifar; say another --run-dir"),
        ({"job_sha256": "cd"}, "began with another version of the job file"),
        ({"seed": 1}, "has --seed 0, and this command has 1; say the same again, or another"),
        ({"metric": "min:loss"}, "has --metric max:accuracy, and this command has min:loss"),
        ({"overrides": []}, "has --set epochs=3, and this command has not at all"),
        ({"mode": "sync"}, "has --mode not at all, and this command has sync"),
        (
            {"space": {"rate": "log(0.1, 1.0)", "depth": "integers(1, 2)"}},
            "depth is not searched there, and integers(1, 2) here",
        ),
        (
            {"space": {"rate": "log(0.1, 1.0)"}},
            "width is integers(1, 2) there, and not searched here",
        ),
    ],
)
def test_another_study_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with StudyDirectory(tmp_path) as directory:
        directory.settle(STUDY)
        with pytest.raises(InvalidArgument) as refused:
            directory.settle({**STUDY, **change})
        assert words in str(refused.value)


def test_what_is_no_study_is_refused(tmp_path: Path) -> None:
    with StudyDirectory(tmp_path) as directory:
        held = (
            rf"another `coordinator tune` runs the study in .*: process {os.getpid()} on .+; stop"
        )
        for ask in (StudyDirectory(tmp_path).__enter__, StudyDirectory(tmp_path).check):
            with pytest.raises(AlreadyExists, match=held):
                ask()
        (tmp_path / "study.json").write_text("{")
        with pytest.raises(
            InvalidArgument, match=r"study.json cannot be read: .*another --run-dir"
        ):
            directory.settle(STUDY)
    (tmp_path / "job.json").touch()
    with pytest.raises(InvalidArgument, match="holds a run, and no study"):
        StudyDirectory(tmp_path).__enter__()
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="cannot use --run-dir"):
        StudyDirectory(tmp_path / "file").__enter__()
    StudyDirectory(tmp_path / "new").check()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "whole"), [(b"{}\n{}\n", b"{}\n{}\n"), (b'{}\n{"op', b"{}\n"), (b'{"op', b"")]
)
def test_a_killed_writer_leaves_a_journal_that_can_be_read(
    tmp_path: Path, text: bytes, whole: bytes
) -> None:
    journal = tmp_path / "journal.log"
    journal.write_bytes(text)
    (tmp_path / "journal.log.lock").symlink_to(journal)
    mend_journal(journal)
    assert journal.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [journal]
    mend_journal(tmp_path / "none")


def test_two_studies_may_begin_in_the_same_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = new_study_directory("job")
    assert first.name.startswith("job-study-")
    first.mkdir(parents=True)
    assert new_study_directory("job") != first


def test_a_directory_with_other_files_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "data.csv").touch()
    with pytest.raises(InvalidArgument, match=r"holds 'data.csv', and no study; say a new or"):
        StudyDirectory(tmp_path).__enter__()
    assert [each.name for each in tmp_path.iterdir()] == ["data.csv"]


def test_what_a_command_leaves_that_is_killed_early_is_no_obstacle(tmp_path: Path) -> None:
    for name in ("lock", ".study.json.tmp"):
        (tmp_path / name).touch()
    with StudyDirectory(tmp_path) as directory:
        assert not directory.settle(STUDY)
