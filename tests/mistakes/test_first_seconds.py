"""Mistakes that need no TensorFlow are said before any process imports it.

The commands are forks of a process that has imported what they import before TensorFlow.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from psrpc.ops.process import child_environment
from tests.e2e.cluster import LIMIT_S
from tests.e2e.warm import fork_without_tensorflow, start_server

pytestmark = pytest.mark.slow  # starts processes

JOB = """
import keras
from worker import Csv, Job
job = Job(model=keras.Sequential, loss="mse", optimizer="sgd", train=Csv({file!r}, y=0))
"""

UP = ("coordinator.cli", "up", "--insecure")
SERVE = ("coordinator.cli", "serve", "--insecure", "--bind", "127.0.0.1:0", "--job")
DESCRIBE = ("worker.cli", "describe")
WORKER = ("worker.cli", "run", "--coordinator", "127.0.0.1:1", "--connect-timeout", "1")

MISTAKES = {
    "a file that is not there": ("gone.py", (), "PS102", "there is no job file 'gone.py'"),
    "a syntax error": ("broken.py", (), "PS103", "SyntaxError: '(' was never closed"),
    "a notebook": ("job.ipynb", (), "PS101", "`jupyter nbconvert --to script job.ipynb` writes"),
    "data for a job": ("data.npz", (), "PS101", "is no Python file"),
    "an unknown key": ("good.py", ("--set", "epohcs=3"), "PS104", "did you mean epochs?"),
    "no value": ("good.py", ("--set", "epochs"), "PS104", "expected key=value"),
    "no data": ("no_data.py", (), "PS106", "there is no file 'gone.csv'"),
    "no start": ("good.py", ("--set", "init_from=gone"), "PS101", "no such file or checkpoint"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.csv").write_text("1,2\n")
    for name, file in (("good.py", "data.csv"), ("no_data.py", "gone.csv")):
        Path(name).write_text(JOB.format(file=file))
    Path("broken.py").write_text("job = Job(\n")
    Path("job.ipynb").write_text('{"cells": []}')
    Path("data.npz").write_bytes(b"PK\x03\x04\x00")


Say = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def say(tmp_path_factory: pytest.TempPathFactory) -> Say:
    """Runs a command where TensorFlow cannot be imported; returns its exit status and output."""
    refused = tmp_path_factory.mktemp("refused")
    for module in ("tensorflow", "keras"):
        (refused / module).mkdir()
        (refused / module / "__init__.py").write_text(f"raise SystemExit('{module} was asked for')")
    environment = child_environment({**os.environ, "PYTHONPATH": str(refused)})
    client = start_server("serve-light", environment)

    def run(*command: str) -> tuple[int, str]:
        with TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
            outputs = (stdout.fileno(), stderr.fileno())
            process = fork_without_tensorflow(command, *outputs, environment, client)
            status = process.wait(LIMIT_S)
            stdout.seek(0)
            stderr.seek(0)
            return status, stdout.read() + stderr.read()

    return run


def test_tensorflow_cannot_be_imported_there(say: Say) -> None:
    assert say("worker.runtime.quiet") == (0, "")
    assert say("worker.step.arenas")[1] == "tensorflow was asked for\n"


@pytest.mark.parametrize("command", [UP, SERVE, DESCRIBE], ids=["up", "serve", "describe"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_job_is_said_first(
    command: tuple[str, ...], mistake: str, say: Say
) -> None:
    file, settings, code, words = MISTAKES[mistake]
    status, said = say(*command, file, *settings)
    assert (status, "was asked for" in said) == (2, False), said
    last = said.splitlines()[-1]
    assert last.startswith(f"error {code}: "), said
    assert words in last
    if code == "PS103":
        assert f'File "{Path(file).absolute()}", line 1' in said
    assert not Path("runs").exists()


@pytest.mark.parametrize("file", ["gone.py", "broken.py"])
def test_a_worker_says_so_of_its_own_copy(file: str, say: Say) -> None:
    status, said = say(*WORKER, "--job", file)
    assert (status, "was asked for" in said) == (2, False), said
    assert said.splitlines()[-1].startswith("error PS10")


@pytest.mark.parametrize(
    "command",
    [
        (*SERVE[:3], "--bind", "{taken}", "--job", "good.py"),
        (*UP, "good.py", "--dashboard", "{taken}", "--max-restarts", "0"),
        (*WORKER, "--metrics", "{taken}", "--insecure"),
        ("pserver.cli", "serve", "--shard", "0", "--bind", "{taken}", "--insecure"),
    ],
    ids=["serve", "dashboard", "metrics", "shard"],
)
def test_a_port_that_is_taken_is_said_first(command: tuple[str, ...], say: Say) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        status, said = say(*(word.format(taken=taken) for word in command))
    assert (status, "was asked for" in said) == (2, False), said
    assert "error PS208: " in said.splitlines()[-1]
