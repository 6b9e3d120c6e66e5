"""Which run is meant, and where its coordinator answers."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from coordinator.certificates.authority import make_certificates
from coordinator.records.run_directory import RunDirectory, Starting
from psrpc.core.errors import CoordinatorUnreachable
from psrpc.files.run_paths import ending_in_words, newest_run, read_ending, unfinished_run
from psrpc.options import locate as whereabouts
from psrpc.options.locate import not_running


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(name: str, began: int, job: str = "jobs/mnist.py") -> Path:
    path = Path("runs") / name
    path.mkdir(parents=True)
    (path / "job.json").write_text(json.dumps({"job": job}))
    os.utime(path / "job.json", (began, began))
    return path


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    whereabouts.add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_newest_run_is_the_one_that_was_started_last() -> None:
    assert newest_run() is None
    old, new = run("mnist-1", 1), run("mine", 2)
    other = run("mnist-cnn-1", 3, "mnist-cnn.py")
    # What a start leaves behind that came to nothing.
    for name in ("ledger.sqlite", "address", "logs", "certs"):
        (old / name).touch()
    Path("runs/mnist-9").mkdir()
    Path("runs/mnist-9/ledger.sqlite").touch()
    assert newest_run() == other
    assert newest_run("mnist") == new
    assert newest_run("mnist-cnn") == other
    assert newest_run("cnn") is None
    os.utime(old / "job.json", (4, 4))
    assert newest_run() == newest_run("mnist") == old
    (old / "job.json").write_text("torn{")
    assert newest_run("mnist") == new


def test_an_unfinished_run_is_found() -> None:
    assert unfinished_run("mnist") is None
    path = run("mine", 1)
    assert unfinished_run("mnist") == path
    assert unfinished_run("cnn") is None
    for holding in (RunDirectory(path, False), held(Starting(path))):
        with holding:
            assert unfinished_run("mnist") is None
    assert unfinished_run("mnist") == path
    (path / "summary.json").write_text('{"phase": "done"}')
    assert unfinished_run("mnist") is None


@contextmanager
def held(starting: Starting) -> Iterator[None]:
    starting.hold()
    yield
    starting.release()


def test_how_a_run_ended_counts_until_it_is_started_again() -> None:
    path = run("a", 10)
    assert read_ending(path) == {}
    (path / "summary.json").write_text(json.dumps({"phase": "failed", "reason": "why"}))
    for written, phase in ((9, None), (10, "failed"), (11, "failed")):
        os.utime(path / "summary.json", (written, written))
        assert read_ending(path).get("phase") == phase
    assert ending_in_words(read_ending(path)) == "failed: why"
    assert ending_in_words({"phase": "done", "reason": ""}) == "done"
    (path / "summary.json").write_text("[1]")
    assert read_ending(path) == {}


def test_a_run_whose_processes_start_again_has_not_ended() -> None:
    path = run("a", 10)
    ending = {"phase": "restarting", "reason": "stopped for dense=allreduce"}
    (path / "summary.json").write_text(json.dumps(ending))
    os.utime(path / "summary.json", (11, 11))
    assert read_ending(path) == {}
    assert "the run has not ended, but its coordinator is gone, or" in str(not_running(path))
    with held(Starting(path)):
        assert str(not_running(path)).endswith(
            "the run was stopped for dense=allreduce, and its coordinator describes the job anew "
            "with that first; ask again"
        )
        os.utime(path / "job.json", (12, 12))
        assert "the run is being started, and its coordinator reads" in str(not_running(path))


def test_a_run_that_is_being_started_is_the_newest() -> None:
    """Commands on the newest run must not report the end of the one before."""
    old, new = run("old", 2), Path("runs/new")
    (old / "summary.json").write_text('{"phase": "done"}')
    new.mkdir()
    starting = Starting(new)
    starting.hold()
    assert newest_run() == new
    assert newest_run("mnist") == old
    with pytest.raises(CoordinatorUnreachable, match="on runs/new: the run is being started"):
        whereabouts.find_coordinator(parse(), {})
    starting.release()
    starting.release()
    assert newest_run() == old
    assert list(new.iterdir()) == []
    # As a killed process leaves it.
    (new / "starting").touch()
    assert newest_run() == old
    assert read_ending(old) == {"phase": "done"}
    starting = Starting(old)
    starting.hold()
    assert read_ending(old) == {}
    starting.release()


def test_where_a_coordinator_answers() -> None:
    """The command line comes first, then the environment, then the newest run."""
    environment = {"PSERVER_COORDINATOR": "there"}
    assert whereabouts.find_coordinator(parse(), {}) == "localhost:5000"
    path = run("a", 1)
    (path / "address").write_text("127.0.0.1:7\n")
    other = run("b", 0)
    (other / "address").write_text("127.0.0.1:8\n")
    assert whereabouts.find_coordinator(parse(), {}) == "127.0.0.1:7"
    assert whereabouts.find_coordinator(parse(), environment) == "there:5000"
    assert whereabouts.find_run(parse(), environment) is None
    said = parse("--run-dir", str(other))
    assert whereabouts.find_coordinator(said, environment) == "127.0.0.1:8"
    assert whereabouts.find_coordinator(parse("--coordinator", "x:1"), environment) == "x:1"
    (path / "address").unlink()
    with pytest.raises(CoordinatorUnreachable, match="on runs/a: the run has not ended, but its"):
        whereabouts.find_coordinator(parse(), {})


def test_a_run_that_is_served_in_plaintext_is_spoken_to_so(tmp_path: Path) -> None:
    """Though it has certificates, of the time when ``coordinator up`` ran it."""
    make_certificates(tmp_path / "certs", "tiny", datetime.now(UTC))
    assert whereabouts.security_of_run(tmp_path).encrypted
    with RunDirectory(tmp_path, resume=False) as directory:
        directory.write_address("127.0.0.1:5000")
        assert not whereabouts.security_of_run(tmp_path).encrypted
        directory.write_address("127.0.0.1:5000", encrypted=True)
        assert whereabouts.security_of_run(tmp_path).encrypted
        directory.write_address("127.0.0.1:5000")
    assert whereabouts.security_of_run(tmp_path).encrypted
