"""Refusals of ``coordinator up``, and the directory that a run gets."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from coordinator.cli import __main__ as cli
from coordinator.cli import up as up_cli
from coordinator.launch import up
from coordinator.launch.commands import reserved_address
from coordinator.process.resume_checks import check_ledger
from coordinator.records.run_directory import RunDirectory
from coordinator.records.store import Store
from psrpc.net.channel import bind, make_server


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    """A command says where this process's logs go: to a standard error that is closed after it."""
    yield
    structlog.reset_defaults()


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    up_cli.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").touch()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--shards", "-1"], "PS110: --shards is -1; expected a whole number of at least 0"),
        (["--workers", "-1"], "PS110: --workers is -1; expected a whole number of at least 1"),
        (["--replicas", "0"], "PS110: --replicas is 0; expected a whole number of at least 1"),
        (
            ["--intra-op-threads", "0"],
            "PS110: --intra-op-threads is 0; expected a whole number of at least 1",
        ),
        (["--workers", "50000"], "PS110: --workers is 50000; a job has 1024 at most"),
        (["--shards", "100000"], "PS110: --shards is 100000; a job has 65536 at most"),
        (["--connect-timeout", "nan"], "PS110: --connect-timeout is nan; expected seconds above 0"),
        (
            ["--max-restarts", "-1"],
            "PS110: --max-restarts is -1; expected a whole number of at least 0",
        ),
        (["--slow-down", "0.5"], "PS110: --slow-down is 0.5; expected a number of at least 1"),
        (
            ["--resume"],
            "PS125: --resume finds no run of job under runs/; say which with --run-dir",
        ),
        (
            ["--resume", "--run-dir", "none"],
            "PS125: --resume: there is no directory none",
        ),
        (
            ["--run-dir", "file"],
            "PS504: cannot make --run-dir file: Not a directory",
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    assert up.run(parse("job.py", *arguments)) == 2
    assert capsys.readouterr() == ("", f"error {line}\n")
    assert {path.name for path in Path().iterdir()} == {"file", "job.py"}


def test_a_job_file_that_is_not_there_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    where = f"there is no job file 'other.txt' (in {Path.cwd()})"
    assert up.run(parse("other.txt")) == 2
    assert capsys.readouterr() == ("", f"error PS102: {where}\n")
    assert up.run(parse("jb.py")) == 2
    assert f"'jb.py' (in {Path.cwd()}); did you mean job.py?" in capsys.readouterr().err
    assert up.run(parse("/")) == 2
    assert "error PS102: the job file '/' cannot be read" in capsys.readouterr().err
    assert cli.main(["serve", "--job", "other.txt", "--bind", "127.0.0.1:0"]) == 2
    assert capsys.readouterr().err == f"error PS102: {where}\n"
    assert [path.name for path in Path().iterdir()] == ["job.py"]


def test_a_port_that_is_taken_is_said_before_the_dashboard_is_announced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        assert up.run(parse("job.py", "--dashboard", where)) == 2
    assert capsys.readouterr() == (
        "",
        f"error PS208: cannot serve the dashboard at {where}: Address already in use; say another "
        "--dashboard\n",
    )
    assert [path.name for path in Path().iterdir()] == ["job.py"]


def ended_run(path: Path) -> None:
    path.mkdir(parents=True)
    with Store(path / "ledger.sqlite") as store:
        store.put("ended", {"phase": "done", "reason": ""})
    (path / "job.json").write_text('{"job": "job.py"}')


def test_a_run_that_has_ended_is_refused_untouched(capsys: pytest.CaptureFixture[str]) -> None:
    """Or a start that comes to nothing would make it the newest."""
    run = Path("runs/old")
    ended_run(run)
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    assert up.run(parse("job.py", "--run-dir", "runs/old")) == 2
    assert capsys.readouterr().err == (
        "error PS123: run directory runs/old holds a run that has ended (done); say --resume to go "
        "on with it, or choose another --run-dir\n"
    )
    after = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    # SQLite leaves two empty files of its own when it is read.
    assert {name: after[name] for name in before} == before
    assert not (run / "certs").exists()
    assert not (run / "logs").exists()


@pytest.mark.parametrize("where", [["--run-dir", "runs/job-1"], ["--resume"]])
def test_a_run_directory_in_use_is_refused_before_anything_is_started(
    where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path("runs/job-1")
    with RunDirectory(run, resume=False):
        (run / "job.json").write_text('{"job": "job.py"}')
        before = sorted(path.name for path in run.iterdir())
        assert up.run(parse("job.py", *where)) == 2
        assert sorted(path.name for path in run.iterdir()) == before
    assert capsys.readouterr().err == (
        f"error PS122: another coordinator is running on {run.absolute()}; stop it first, or "
        "choose another --run-dir\n"
    )


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_damaged_ledger_is_refused_before_anything_is_started(
    resume: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/old").mkdir(parents=True)
    ledger = Path("runs/old/ledger.sqlite")
    ledger.write_text("this is no database, however long it is" * 100)
    assert up.run(parse("job.py", "--run-dir", "runs/old", *resume)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error PS406: ")
    assert "is damaged: file is not a database; put an empty file in its place" in said
    assert [path.name for path in Path("runs/old").iterdir()] == ["ledger.sqlite"]
    ledger.write_text("")
    for name in ("old", "none"):
        check_ledger(Path("runs") / name, resume=False)


@pytest.mark.parametrize("setting", ["epochs", "=3", " =3"])
def test_a_setting_without_a_value_is_refused_before_anything_starts(
    setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert up.run(parse("job.py", "--set", "epochs=3", "--set", setting)) == 2
    assert capsys.readouterr().err == (
        f"error PS104: --set {setting}: expected key=value, for example epochs=3\n"
    )


@pytest.mark.usefixtures("own_signals")
def test_a_run_directory_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").mkdir()
    Path("runs/logs").touch()
    assert up.run(parse("job.py", "--run-dir", "runs")) == 2
    assert capsys.readouterr().err == (
        "error PS504: cannot start the processes of the job: runs/logs: File exists\n"
    )


def test_two_runs_in_one_second_have_their_own_directories(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(up, "new_run_directory", lambda name, _utc: Path("runs") / f"{name}-1")
    made = [up.make_run_directory(parse("job.py")) for _ in range(3)]
    assert made == [(True, Path("runs") / name) for name in ("job-1", "job-1-2", "job-1-3")]


def test_the_coordinators_address_is_kept_for_it() -> None:
    with reserved_address() as address:
        for _ in range(2):
            server = make_server(threads=1)
            assert bind(server, address) == int(address.rpartition(":")[2])
            server.start()
            server.stop(grace=None).wait()
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", int(address.rpartition(":")[2])))
