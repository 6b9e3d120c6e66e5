"""The warm start of ``coordinator up`` with TensorFlow."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.cluster import (
    JOBS,
    Process,
    command,
    command_line,
    maps,
    members,
    processes_of,
    until,
    wait_until_gone,
)

pytestmark = pytest.mark.slow

DENSE = JOBS / "dense.py"
FORK_SERVER = "worker.cli.fork_server"


def cluster(run_dir: Path, *more: str) -> Process:
    """A cluster with more work than any test waits for, which has begun."""
    sets = ("--set", "epochs=100000")
    line = command("coordinator", "up", DENSE, "--run-dir", run_dir, *sets, *more)
    running = Process("up", "coordinator", line=line)
    running.wait_for("training  epoch")
    return running


def parent(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def fork_servers(up: int) -> list[int]:
    """The fork servers of a ``coordinator up``."""
    children = Path(f"/proc/{up}/task/{up}/children").read_text().split()
    return [int(pid) for pid in children if FORK_SERVER in command_line(int(pid))]


def is_fork(pid: int) -> bool:
    """Whether a process has its command line in one word, as forks have."""
    return b"\0run\0" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def restarted(run_dir: Path, worker: int) -> int:
    """Kills the only worker; returns its successor."""
    os.kill(worker, signal.SIGKILL)
    until(lambda: set(members(run_dir, "worker")) - {worker} != set(), "the next worker")
    [successor] = members(run_dir, "worker")
    return successor


def test_a_worker_restarts_warm_while_there_is_a_server_and_else_fresh(tmp_path: Path) -> None:
    """Shards of the numpy engine have no TensorFlow."""
    run_dir = tmp_path / "run"
    running = cluster(run_dir, "--set", "engine=numpy")
    up = running.popen.pid
    [shard], [worker] = members(run_dir, "pserver"), members(run_dir, "worker")
    assert "tensorflow" not in maps(shard)
    assert "tensorflow" in maps(worker)
    assert is_fork(worker)
    assert parent(worker) == parent(shard) == up
    worker = restarted(run_dir, worker)
    assert is_fork(worker)
    [server] = fork_servers(up)
    os.kill(server, signal.SIGKILL)
    until(lambda: not fork_servers(up), "the server's end")
    worker = restarted(run_dir, worker)
    assert not is_fork(worker)
    running.wait_for("fork server has ended with status -9")
    assert len(re.findall("without warm start", running.text())) == 1
    running.kill(signal.SIGINT)
    assert running.wait() == 130
    assert not processes_of(run_dir)
    running.end()


def test_a_shard_of_the_keras_engine_restarts_warm_and_all_end_with_up(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    running = cluster(run_dir, "--set", "engine=keras")
    up = running.popen.pid
    [shard] = members(run_dir, "pserver")
    assert "tensorflow" in maps(shard)
    os.kill(shard, signal.SIGKILL)
    until(lambda: set(members(run_dir, "pserver")) - {shard} != set(), "the next shard")
    [shard] = members(run_dir, "pserver")
    assert b"\0serve\0" not in Path(f"/proc/{shard}/cmdline").read_bytes(), "a fork"
    assert parent(shard) == up
    # Not by the screen: between two looks at the status it misses so short an absence.
    log = run_dir / "logs" / "shard-0.log"
    until(lambda: log.read_text().count("] ready ") == 2, "the shard's second readiness")
    pids = [*processes_of(run_dir), *fork_servers(up)]
    running.kill()
    running.wait()
    wait_until_gone(pids)
    running.end()


def test_without_warm_start_nothing_is_forked(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    running = cluster(run_dir, "--no-warm-start")
    assert fork_servers(running.popen.pid) == []
    assert not any(map(is_fork, members(run_dir, "worker")))
    running.kill(signal.SIGINT)
    assert running.wait() == 130
    assert "warm start" not in running.text()
    running.end()
