"""``--step-times``: what the workers of a real cluster leave behind."""

from __future__ import annotations

import csv
import signal
from pathlib import Path

import pytest

from tests.e2e.cluster import JOBS, Process, ended, processes_of, up

pytestmark = pytest.mark.slow

DENSE = JOBS / "dense.py"


def read_steps(run_dir: Path) -> dict[str, list[dict[str, float]]]:
    """The steps of each worker, by the name of its process."""
    found = {}
    for path in (run_dir / "steps").iterdir():
        with path.open() as file:
            rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
        found[path.stem] = rows
    return found


def test_every_step_is_there_with_the_parts_of_its_mode(tmp_path: Path) -> None:
    """Of an async epoch and of a sync one."""
    then = ("--set", "then=sync", "--set", "then_after=1")
    up(DENSE, tmp_path, "--workers", "2", "--mode", "async", *then, "--step-times")
    workers = read_steps(tmp_path)
    assert set(workers) == {"worker-a", "worker-b"}
    steps = [step for rows in workers.values() for step in rows]
    first = [step for step in steps if step["push_pull_s"] > 0]
    second = [step for step in steps if step["push_pull_s"] == 0]
    assert (len(first), len(second)) == (62, 62), "62 batches in each of two epochs"
    assert parts(first) == {"data_s", "compute_s", "push_pull_s"}
    assert parts(second) == {"data_s", "compute_s", "pull_s", "push_s", "commit_s"}
    for rows in workers.values():
        starts = [step["start_s"] for step in rows]
        assert starts == sorted(starts)


def parts(steps: list[dict[str, float]]) -> set[str]:
    """Those that took any time."""
    return {part for part in steps[0] if any(step[part] > 0 for step in steps)} - {"start_s"}


def test_ctrl_c_stops_everything_and_workers_write_them_too(tmp_path: Path) -> None:
    args = ("--workers", "2", "--shards", "2", "--step-times", "--set", "epochs=100000")
    cluster = Process("up", "coordinator", "up", DENSE, "--run-dir", tmp_path, *args)
    cluster.wait_for("training  epoch [2-9]")
    cluster.kill(signal.SIGINT)
    assert cluster.wait() == 130
    assert not processes_of(tmp_path)
    cluster.end()
    assert sum(map(len, read_steps(tmp_path).values())) >= 62


def test_a_file_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    done = ended("worker", "run", "--step-times", tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error PS504: --step-times {tmp_path}: Is a directory\n"
