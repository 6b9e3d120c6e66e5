"""``coordinator logs`` and ``coordinator env``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from coordinator.cli import env as env_cli
from coordinator.cli import logs as logs_cli
from coordinator.cli.__main__ import main


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "coordinator.log").write_text(
        "2026-01-01T00:00:01.0 [info] one\nTraceback\n  frame\n2026-01-01T00:00:04.0 [info] four\n"
    )
    (logs / "shard-0.log").write_text(
        "before any time\n2026-01-01T00:00:02.0 [info] two\n2026-01-01T00:00:03.0 [info] three"
    )
    return tmp_path


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.split(" | ")[1].split("] ")[-1] for line in capsys.readouterr().out.splitlines()]


def test_lines_come_by_time(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--run-dir", str(run_dir)]) == 0
    # What is not whole yet is not shown; a traceback stays with its line.
    assert said(capsys) == ["before any time", "one", "Traceback", "  frame", "two", "four"]


def test_no_terminal_obeys_what_is_in_a_log(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Escape sequences printed by the job's own code do not reach the terminal."""
    log = run_dir / "logs" / "worker-a.log"
    log.write_bytes(b"\x1b]0;owned\x07 a\tb \x1b[2J 50 %\r100 %\n")
    assert main(["logs", "--run-dir", str(run_dir), "worker-a"]) == 0
    assert capsys.readouterr().out == (
        "worker-a | \ufffd]0;owned\ufffd a    b \ufffd[2J 50 %\ufffd100 %\n"
    )


def test_of_a_run_that_was_started_by_hand_it_says_where_to_look(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run_dir / "logs")
    (run_dir / "job.json").write_text('{"job": "job.py"}')
    assert main(["logs", "--run-dir", str(run_dir)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error PS126: the processes of {run_dir} were started by hand")
    assert "docker compose -f docker/compose.yml logs --follow" in said


def test_one_process(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--run-dir", str(run_dir), "shard-0"]) == 0
    assert capsys.readouterr().out.startswith("shard-0 | before any time\n")
    assert main(["logs", "--run-dir", str(run_dir), "shard-1"]) == 2
    assert capsys.readouterr().err == (
        f"error PS110: {run_dir} has no log of 'shard-1'; it has those of coordinator, shard-0\n"
    )
    assert main(["logs", "--run-dir", str(run_dir / "logs")]) == 2
    assert capsys.readouterr().err.startswith("error PS125: ")


def test_logs_for_machines_are_in_universal_time() -> None:
    line = json.dumps({"event": "x", "timestamp": "1970-01-01T00:01:00Z"})
    assert logs_cli.line_stamp(line) == 60.0
    for odd in ("{not json", '{"timestamp": 5}', "[1]", "{}", ""):
        assert logs_cli.line_stamp(odd) is None


def test_later_lines_are_followed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also by a process that starts later, until the coordinator has gone and all is quiet."""
    (run_dir / "address").touch()
    pauses = 0

    def pause(_seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 1:
            with (run_dir / "logs/shard-0.log").open("a") as log:
                log.write(" whole\n")
            (run_dir / "logs/worker-a.log").write_text("2026-01-01T00:00:05.0 [info] five\nlast")
        if pauses == 3:
            (run_dir / "address").unlink()

    logs = [logs_cli.Log(path) for path in logs_cli.find_logs(run_dir, ())]
    list(logs_cli.merged(logs))
    logs_cli.follow_logs(run_dir, (), logs, pause)
    assert pauses == 2 + logs_cli.QUIET
    assert said(capsys) == ["three whole", "five", "last"]
    for log in logs:
        log.close()


def test_content_of_a_bug_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["grpcio"][0].isdigit()
    assert {"version", "python", "platform", "cores", "gpus", "environment"} <= set(found)
    assert main(["env"]) == 0
    assert "  tensorflow: 2." in capsys.readouterr().out


def test_no_secret_is_shown() -> None:
    given = {"PSERVER_TOKEN": "s3cret", "PSERVER_TOKEN_FILE": "/etc/token", "HOME": "/root"}
    assert env_cli.settings(given) == {
        "PSERVER_TOKEN": env_cli.OMITTED,
        "PSERVER_TOKEN_FILE": "/etc/token",
    }
