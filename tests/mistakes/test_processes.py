"""Mistakes that take real processes: their words are read from standard error."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from coordinator.certificates.authority import make_certificates
from psrpc.security.credentials import Security
from psrpc.security.identity import Role
from tests.coordinator.builders import make_run, serving
from tests.coordinator.fixtures import training
from tests.e2e.cluster import JOBS, command, ended, environment
from tests.mistakes.commands import SAID

pytestmark = pytest.mark.slow


def test_a_firewall_is_named_before_any_deadline_has_passed() -> None:
    """The first line of who waits says why, while its first call is still under way."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        where = f"127.0.0.1:{full.getsockname()[1]}"
        shard = subprocess.Popen(
            command("pserver", "serve", "--shard", "0", "--coordinator", where),
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        try:
            assert shard.stderr is not None
            line = next(line for line in shard.stderr if "waiting for" in line)
        finally:
            shard.kill()
            shard.communicate()
    SAID.append("PS209")
    assert f"waiting for the coordinator at {where} (0 of 120 s): PS209: " in line
    assert "firewall" in line


def test_other_data_than_the_coordinators(tmp_path: Path) -> None:
    job = JOBS / "dense.py"
    sha256 = hashlib.sha256(job.read_bytes()).hexdigest()
    with serving(make_run(tmp_path, job_sha256=sha256, data_fingerprint="f00d")) as served:
        done = ended("worker", "run", "--coordinator", served.address, "--job", job)
    assert done.returncode == 2, done.stderr
    SAID.append("PS133")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error PS133: the training data of {job} has fingerprint ")
    assert "copy the same data to every machine" in last
    assert "Traceback" not in done.stderr


def test_a_worker_without_certificates(tmp_path: Path) -> None:
    """Ends as a shard does."""
    make_certificates(tmp_path / "certs", "job", datetime.now(UTC))
    own = Security.from_options(Role.COORDINATOR, tmp_path / "certs")
    with serving(make_run(tmp_path), security=own) as served:
        done = ended("worker", "run", "--coordinator", served.address)
    assert done.returncode == 2, done.stderr
    SAID.append("PS331")
    assert done.stderr.splitlines()[-1].startswith(f"error PS331: {served.address} wants TLS")


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with training(make_run(tmp_path / "run", shards=2)):
        pass
    done = ended(
        *("coordinator", "serve", "--job", JOBS / "dense.py", "--shards", "2", "--resume"),
        *("--run-dir", tmp_path / "run", "--bind", "127.0.0.1:0"),
    )
    assert done.returncode == 2, done.stderr
    SAID.append("PS405")
    assert "error PS405: cannot resume from " in done.stderr.splitlines()[-1]
    assert "start a new run" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
