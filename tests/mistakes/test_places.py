"""Mistakes with run directories, disks and checkpoints."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.records.run_directory import RunDirectory
from coordinator.records.store import Store
from coordinator.records.stored_values import ENDED
from psrpc import SOFTWARE
from psrpc.checkpoint.manifest import MANIFEST
from tests.coordinator.builders import description_json, make_run
from tests.coordinator.fixtures import training
from tests.mistakes.commands import Said, say


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file, in a directory where nothing else is."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.py"
    path.write_text("job = None\n")
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that was started before, so that its job need not be described again."""
    path = tmp_path / "run"
    path.mkdir()
    sha256 = hashlib.sha256((tmp_path / "job.py").read_bytes()).hexdigest()
    kept: dict[str, Any] = {
        "job": "job.py",
        "overrides": [],
        "mode": None,
        "replicas": None,
        "software": SOFTWARE,
    }
    kept["description"] = description_json(job_sha256=sha256)
    (path / "job.json").write_text(json.dumps(kept))
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first checkpoint of a run with two shards."""
    path = tmp_path_factory.mktemp("trained")
    with training(make_run(path, shards=2)):
        [found] = (path / "checkpoints").glob("step-*")
    return found


def serve(capfd: pytest.CaptureFixture[str], *arguments: object) -> Said:
    return say(
        *(capfd, "coordinator", "serve", "--job", "job.py", "--bind", "127.0.0.1:0"), *arguments
    )


def check(said: Said, code: str, fix: str, status: int = 2) -> None:
    assert (said.code, said.status) == (code, status), said.everything
    assert fix in said.message
    assert "Traceback" not in said.everything


def test_a_run_directory_in_use(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with RunDirectory(run_dir, resume=False):
        check(serve(capfd, "--run-dir", run_dir), "PS122", "stop it first, or choose another")


def test_a_run_directory_in_use_is_refused_before_the_job_is_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing remembers what the job is, and reading it would say that it is none."""
    with RunDirectory(tmp_path / "other", resume=False):
        check(serve(capfd, "--run-dir", tmp_path / "other"), "PS122", "stop it first")


def test_a_run_that_has_ended(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _settled(run_dir, capfd)
    with Store(run_dir / "ledger.sqlite") as store:
        store.put(ENDED, {"phase": "done", "reason": ""})
    check(serve(capfd, "--run-dir", run_dir), "PS123", "say --resume")


def test_a_run_of_another_job(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _settled(run_dir, capfd)
    said = serve(capfd, "--run-dir", run_dir, "--shards", "2")
    check(said, "PS124", "its shards is 1, this one's 2. Start it as it was")


def _settled(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Makes the books of a run, with one shard."""
    from coordinator.core.description_reader import parse_description
    from coordinator.process.options import ServeOptions
    from coordinator.process.settling import settle
    from psrpc.core.placement import make_plan

    kept = json.loads((run_dir / "job.json").read_text())
    description = parse_description(json.dumps(kept["description"]))
    plan = make_plan(description.variables, 1, description.placement)
    options = ServeOptions(job=Path("job.py"), run_dir=run_dir)
    with RunDirectory(run_dir, False) as directory, Store(run_dir / "ledger.sqlite") as store:
        settle(options, description, plan, directory, store)


def test_nothing_to_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = say(capfd, "coordinator", "up", "job.py", "--resume")
    check(said, "PS125", "say which with --run-dir")


def test_no_permission(capfd: pytest.CaptureFixture[str]) -> None:
    """Where not even root may make anything."""
    said = say(capfd, "coordinator", "up", "job.py", "--run-dir", "/sys/run")
    check(said, "PS503", "; let this user write there (`ls -ld` shows owner")


def test_a_file_where_a_directory_is_expected(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = say(capfd, "coordinator", "up", "job.py", "--run-dir", "job.py/run")
    check(said, "PS504", "Not a directory")


def test_a_full_disk(capfd: pytest.CaptureFixture[str]) -> None:
    said = say(capfd, "worker", "run", "--step-times", "/dev/full")
    check(said, "PS502", "No space left on device")


def test_no_number_of_workers(capfd: pytest.CaptureFixture[str]) -> None:
    said = say(capfd, "coordinator", "up", "job.py", "--workers", "-1")
    check(said, "PS110", "expected a whole number of at least 1")


def test_a_damaged_checkpoint(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = _copy(checkpoint, tmp_path)
    manifest = copy / MANIFEST
    manifest.write_text(manifest.read_text().replace('"global_step": 0', '"global_step": 7'))
    said = say(capfd, "coordinator", "checkpoint", "verify", copy)
    check(said, "PS401", "it is torn, or was changed")


def test_a_checkpoint_of_an_older_format(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = _copy(checkpoint, tmp_path)
    document = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps(document | {"format": 0}))
    said = say(capfd, "coordinator", "checkpoint", "verify", copy)
    check(said, "PS403", "its format is 0; this version reads")


def test_a_directory_without_checkpoints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = say(capfd, "coordinator", "export", tmp_path / "gone", "--to", "model.keras")
    check(said, "PS404", "expected a run or a checkpoint")


def test_logs_of_a_run_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    check(say(capfd, "coordinator", "logs"), "PS125", "say --run-dir DIR")


def _copy(checkpoint: Path, where: Path) -> Path:
    copy = where / checkpoint.name
    copy.mkdir()
    for path in checkpoint.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy
