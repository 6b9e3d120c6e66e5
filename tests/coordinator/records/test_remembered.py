"""A run that goes on is described from its directory, but only if nothing about it has changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.core.description import JobDescription
from coordinator.records.run_directory import remembered, started_with
from tests.coordinator.builders import describe


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text("job = 1\n")
    return path


@pytest.fixture
def description(job: Path) -> JobDescription:
    return describe(job_sha256=hashlib.sha256(job.read_bytes()).hexdigest())


@pytest.fixture
def run_dir(tmp_path: Path, job: Path, description: JobDescription) -> Path:
    kept = started_with(job, ["epochs=2"], "sync", 3, description)
    (tmp_path / "job.json").write_text(json.dumps(kept))
    return tmp_path


def test_the_same_command_finds_the_same_job(
    run_dir: Path, job: Path, description: JobDescription
) -> None:
    assert remembered(run_dir, job, ["epochs=2"], "sync", 3) == description


@pytest.mark.parametrize(
    "command",
    [
        ([], "sync", 3),
        (["epochs=3"], "sync", 3),
        (["epochs=2"], None, 3),
        (["epochs=2"], "sync", 2),
    ],
)
def test_another_command_has_it_described(run_dir: Path, job: Path, command: Any) -> None:
    assert remembered(run_dir, job, *command) is None


def change(key: str, value: object) -> Callable[[Path], None]:
    def apply(run_dir: Path) -> None:
        path = run_dir / "job.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda run_dir: (run_dir / "job.py").write_text("job = 2\n"),
        lambda run_dir: (run_dir / "job.py").unlink(),
        lambda run_dir: (run_dir / "job.json").unlink(),
        lambda run_dir: (run_dir / "job.json").write_text("{"),
        lambda run_dir: (run_dir / "job.json").write_text("[]"),
        change("software", "0.0.0"),
        change("description", {"format": 1}),
        change("description", None),
    ],
)
def test_a_changed_job_is_described_anew(
    run_dir: Path, job: Path, damage: Callable[[Path], object]
) -> None:
    damage(run_dir)
    assert remembered(run_dir, job, ["epochs=2"], "sync", 3) is None
