"""``--step-times``: what the workers of a real cluster leave behind."""

from __future__ import annotations

import csv
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.cluster import JOBS, LIMIT_S, Process, command, environment, up

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


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_every_step_is_there_with_the_parts_of_its_mode(tmp_path: Path, mode: str) -> None:
    up(DENSE, tmp_path, "--workers", "2", "--mode", mode, "--step-times")
    workers = read_steps(tmp_path)
    assert set(workers) == {"worker-a", "worker-b"}
    steps = [step for rows in workers.values() for step in rows]
    assert len(steps) == 124, "62 batches in each of two epochs"
    parts = {
        "async": {"data_s", "compute_s", "push_pull_s"},
        "sync": {"data_s", "compute_s", "pull_s", "push_s", "commit_s"},
    }
    spent = {part for part in steps[0] if any(step[part] > 0 for step in steps)} - {"start_s"}
    assert spent == parts[mode]
    for rows in workers.values():
        starts = [step["start_s"] for step in rows]
        assert starts == sorted(starts)


def test_a_worker_that_is_told_to_stop_writes_them_too(tmp_path: Path) -> None:
    args = ("--run-dir", tmp_path, "--step-times", "--set", "epochs=100000")
    cluster = Process("up", "coordinator", "up", DENSE, *args)
    cluster.wait_for("training  epoch [2-9]")
    cluster.kill(signal.SIGINT)
    assert cluster.wait() == 130
    cluster.end()
    assert len(read_steps(tmp_path)["worker-a"]) >= 62


def test_a_file_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        command("worker", "run", "--step-times", tmp_path),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(),
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == f"error PS504: --step-times: [Errno 21] Is a directory: '{tmp_path}'\n"
