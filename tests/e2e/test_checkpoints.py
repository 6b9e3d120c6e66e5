"""Checkpoints that a real run keeps, and the commands that look after them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import JOBS, Run, ended, up

pytestmark = pytest.mark.slow


def checkpoint(*arguments: str | Path, status: int = 0) -> str:
    """Output of ``coordinator checkpoint``."""
    done = ended("coordinator", "checkpoint", *arguments)
    assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def rows(run: Run) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(checkpoint("ls", "--json", run.run_dir))
    return found


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    settings = ["keep_checkpoints=2", "keep_best=max:loss", "checkpoint_every=8", "epochs=4"]
    arguments = [word for setting in settings for word in ("--set", setting)]
    where = ("--shards", "2", "--workers", "1", "--mode", "sync")
    run = up(JOBS / "dense.py", tmp_path / "run", *where, *arguments)
    assert run.summary["warnings"] == []
    # The loss falls, so the first epoch is the "best" one, which the newest have left far behind.
    losses = {e["global_step"]: e["loss"] for e in run.summary["evaluations"]}
    best = max(losses, key=lambda step: losses[step])
    assert best == 21
    # One that is due while another is being written comes later than its step.
    log = (run.run_dir / "logs" / "coordinator.log").read_text()
    saved = sorted(map(int, re.findall(r"checkpoint saved .*snapshot=step-(\d+)", log)))
    assert saved[-1] == 84
    second = saved[-2]
    found = rows(run)
    assert [row["global_step"] for row in found] == [84, second, 21]
    assert [row["marks"] for row in found] == [["newest"], [], ["best"]]
    assert [row["score"] for row in found] == [losses[84], None, losses[21]]

    lines = checkpoint("verify", run.run_dir).splitlines()
    assert lines[-1] == "the newest good one is step-00000084"
    assert len(lines) == 3 * 2 + 1
    one, other = (run.run_dir / "checkpoints" / f"step-{step:08d}" for step in (21, 84))
    assert "global step: 21 and 84\n" in checkpoint("diff", one, other, status=1)
    assert checkpoint("prune", "--keep", "1", run.run_dir).splitlines() == [
        f"step-{second:08d}  removed",
        "2 left",
    ]
    assert [row["global_step"] for row in rows(run)] == [84, 21]
