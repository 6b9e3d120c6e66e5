"""A log that cannot be written ends no process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

SPEAKER = """
import sys
from psrpc.ops.logs import configure, get_logger
{configure}
log = get_logger()
for index in range(1000):
    log.info("something", index=index)
    print("word", "\\udcff", file=sys.stdout, flush=True)
    sys.stderr.write("more")
with open({path!r}, "w") as out:
    out.write("whole")
"""


def speak(path: Path, stdout: IO[bytes], stderr: IO[bytes], configure: str) -> int:
    code = SPEAKER.format(path=str(path), configure=configure)
    return subprocess.run(
        [sys.executable, "-c", code],
        stdout=stdout,
        stderr=stderr,
        check=False,
    ).returncode


@pytest.mark.slow
@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_full_disk_loses_logs_and_ends_no_process(tmp_path: Path, log_format: str) -> None:
    with Path("/dev/full").open("wb") as full:
        setup = f"configure({log_format!r}, 'shard 0')"
        assert speak(tmp_path / "said", full, full, setup) == 0
        assert (tmp_path / "said").read_text() == "whole"
        assert speak(tmp_path / "not", full, full, "") != 0
    assert not (tmp_path / "not").exists()


@pytest.mark.slow
def test_nor_does_a_reader_that_has_gone(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.wait()
    assert speak(tmp_path / "said", process.stdin, process.stdin, "configure('json', 'x')") == 0
    process.stdin.close()
    assert (tmp_path / "said").read_text() == "whole"


@pytest.mark.slow
def test_lines_that_fit_are_written(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        assert speak(tmp_path / "said", out, err, "configure('json', 'x')") == 0
    assert (tmp_path / "out").read_text() == "word \\udcff\n" * 1000
    lines = (tmp_path / "err").read_text().splitlines()
    assert lines[-1] == "more"
    assert all('"event": "something"' in line for line in lines[:-1])
    assert len(lines) == 1001
