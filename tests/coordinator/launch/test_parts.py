"""The parts of a prediction run to their end, are started again when killed, and leave nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.launch import parts
from coordinator.launch.commands import cluster_environment
from coordinator.launch.parts import Parts
from coordinator.launch.warm_start import PART, WarmStart, is_warm
from psrpc.ops.exit_status import DONE, FAILED, INTERRUPTED
from psrpc.ops.host_requests import PartsRequest
from psrpc.ops.process import module_command

KILLS = """
import os, signal
from pathlib import Path
for number in range({times}):
    try:
        Path(sys.argv[1], f"{{number}}.{{sys.argv[2]}}").touch(exist_ok=False)
    except FileExistsError:
        continue
    os.kill(os.getpid(), signal.SIGKILL)
"""
HANGS = "import time; time.sleep(600)"


@pytest.fixture(autouse=True)
def life_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The other end of standard input."""
    ours, theirs = os.pipe()
    monkeypatch.setattr(parts, "STDIN", ours)
    before = signal.getsignal(signal.SIGINT)
    try:
        yield theirs
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(ours)


def run(tmp_path: Path, code: str, count: int = 2) -> int:
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "code.py").write_text(code)
    environment = cluster_environment({**os.environ, "PYTHONPATH": str(Path.cwd())})
    request = PartsRequest(str(folder), count, "")
    module = "tests.coordinator.launch.a_part"
    return Parts(request, environment, WarmStart(environment), module).run()


def test_all_parts_run_with_their_share_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    code = "import os; print(*sys.argv[2:], os.environ['TF_NUM_INTRAOP_THREADS'])"
    assert run(tmp_path, code) == DONE
    said = [(tmp_path / "logs" / f"part-{i}.log").read_text() for i in range(2)]
    assert said == ["0 2 3\n", "1 2 3\n"]


def test_a_killed_part_is_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, KILLS.format(times=1), count=1) == DONE
    assert (tmp_path / "parts" / "0.0").exists()
    assert capsys.readouterr().out == "part-0 ended with signal SIGKILL and is started again\n"


def test_a_part_killed_too_often_ends_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, KILLS.format(times=9), count=1) == FAILED
    assert len(list((tmp_path / "parts").glob("*.0"))) == parts.RESTARTS + 1
    log = tmp_path / "logs" / "part-0.log"
    assert capsys.readouterr().err == (
        f"error PS601: part-0 was killed 4 times, signal SIGKILL; see {log}\n"
    )


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("print('Traceback\\nerror PS103: it raised'); sys.exit(1)", "error PS103: it raised"),
        ("sys.exit('no more')", "error PS601: part-1 ended with exit status 1: no more; see {log}"),
    ],
)
def test_a_part_that_fails_ends_all_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, line: str
) -> None:
    code = f"if sys.argv[2] == '1':\n    {code}\nimport time; time.sleep(600)"
    assert run(tmp_path, code) == FAILED
    log = tmp_path / "logs" / "part-1.log"
    assert capsys.readouterr().err == line.format(log=log) + "\n"


def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    code = f"import os; os.kill(os.getppid(), {int(signal.SIGINT)})\n{HANGS}"
    assert run(tmp_path, code) == INTERRUPTED


def test_the_end_of_standard_input_ends_all(tmp_path: Path, life_line: int) -> None:
    os.close(life_line)
    assert run(tmp_path, HANGS) == INTERRUPTED


def test_a_folder_that_takes_no_log_fails_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("")
    assert run(tmp_path, HANGS) == FAILED
    assert capsys.readouterr().err.startswith("error PS504: cannot start the parts in ")


def test_parts_are_forks_where_there_is_a_server(tmp_path: Path) -> None:
    assert is_warm(module_command(PART, "folder", "0", "1"), tmp_path)
