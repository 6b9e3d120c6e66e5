"""The choice of a checkpoint and of its job; tests/e2e shows that plain Keras loads an export."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import pytest

from coordinator.checkpoints.snapshots import checkpoint_name
from coordinator.cli import export as export_cli
from coordinator.export import export
from coordinator.export.export import find_source
from coordinator.records.run_directory import LEDGER
from coordinator.records.store import Store
from psrpc.checkpoint.checkpoint import Manifest, ManifestFile, commit
from psrpc.core.errors import CheckpointError, InvalidJob
from psrpc.core.placement import make_plan
from psrpc.core.plan import VariableSpec
from tests.coordinator.builders import description_json


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    export_cli.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 0, 500 and 1000."""
    job = tmp_path / "job.py"
    job.write_text("job = 1\n")
    path = tmp_path / "runs" / "job-1"
    (path / "checkpoints").mkdir(parents=True)
    (path / "job.json").write_text(json.dumps({"job": str(job)}))
    for step in (0, 500, 1000):
        add_checkpoint(path, step, hashlib.sha256(job.read_bytes()).hexdigest())
    return path


def add_checkpoint(run_dir: Path, step: int, job_sha256: str, generation: int = 1) -> None:
    temporary = run_dir / "checkpoints" / f".tmp-{step}"
    temporary.mkdir()
    content = str(step).encode()
    (temporary / "shard-0").write_bytes(content)
    manifest = Manifest(
        run_id="r",
        name=checkpoint_name(step, generation),
        global_step=step,
        generation=generation,
        policy=1,
        mode="async",
        replicas=0,
        plan=make_plan([VariableSpec("w", (2,), "float32", "trainable", None)], 1, "cut"),
        optimizer={},
        engine="numpy",
        seed=0,
        batch_size=1,
        data_fingerprint="",
        job="job",
        job_sha256=job_sha256,
        files=(
            ManifestFile(0, "shard-0", len(content), hashlib.sha256(content).hexdigest(), step),
        ),
        details={"overrides": ["epochs=3", f"seed={step}"]},
    )
    commit(temporary, run_dir / "checkpoints" / manifest.name, manifest)


def test_the_newest_checkpoint_with_the_overrides_it_was_trained_with(run_dir: Path) -> None:
    source = find_source(run_dir, step=None, job=None)
    assert source.checkpoint == run_dir / "checkpoints" / "step-00001000"
    assert source.global_step == 1000
    assert source.job == str(run_dir.parent.parent / "job.py")
    assert source.overrides == ("epochs=3", "seed=1000")
    assert source.remarks == ()


def test_a_damaged_checkpoint_is_passed_over_and_named(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "step-00001000" / "shard-0").write_bytes(b"1001")
    source = find_source(run_dir, step=None, job=None)
    assert source.global_step == 500
    (remark,) = source.remarks
    assert remark.startswith("passed over step-00001000: ")


def test_one_step_of_a_run(run_dir: Path) -> None:
    assert find_source(run_dir, step=0, job=None).global_step == 0
    add_checkpoint(run_dir, 500, "00", generation=2)
    assert find_source(run_dir, step=500, job=None).checkpoint.name == "step-00000500.g2"
    with pytest.raises(
        CheckpointError,
        match=r"has no checkpoint of step 7; it has step-00000000, .*00500, .*00500\.g2, .*01000$",
    ):
        find_source(run_dir, step=7, job=None)


def test_one_checkpoint_by_its_directory(run_dir: Path) -> None:
    directory = run_dir / "checkpoints" / "step-00000500"
    source = find_source(directory, step=None, job=None)
    assert (source.checkpoint, source.global_step) == (directory, 500)
    (directory / "shard-0").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has 0 bytes; expected 3"):
        find_source(directory, step=None, job=None)


def test_a_job_that_has_changed_or_gone(run_dir: Path) -> None:
    job = run_dir.parent.parent / "job.py"
    job.write_text("job = 2\n")
    assert find_source(run_dir, None, None).remarks == (
        f"{job} has changed since the checkpoint was written",
    )
    moved = job.rename(job.with_name("moved.py"))
    with pytest.raises(InvalidJob, match=r"cannot read the job file .*job\.py: .* --job FILE$"):
        find_source(run_dir, None, None)
    assert find_source(run_dir, None, str(moved)).job == str(moved)


def test_a_run_that_does_not_say_its_job(run_dir: Path) -> None:
    (run_dir / "job.json").unlink()
    with pytest.raises(InvalidJob, match=r"job\.json does not say where .* --job FILE$"):
        find_source(run_dir, None, None)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("nowhere", "there is no directory nowhere; expected a run or a checkpoint"),
        (".", ". has neither checkpoints/ nor manifest.json; expected a run or a checkpoint"),
    ],
)
def test_bad_input_is_one_line(
    source: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert export.run(parse(source, "--to", "model.keras")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error PS")
    assert err.endswith(f"{line}\n")
    assert err.count("\n") == 1


def say_best(run_dir: Path, checkpoint: str) -> None:
    best = {"epoch": 2, "checkpoint": checkpoint, "loss": 0.5}
    (run_dir / "summary.json").write_text(json.dumps({"phase": "done", "best": best}))


def test_a_run_that_restores_its_best_epoch_exports_that(run_dir: Path) -> None:
    say_best(run_dir, "checkpoints/step-00000500")
    source = find_source(run_dir, step=None, job=None)
    assert source.global_step == 500
    assert source.remarks == ("step-00000500 is of the best epoch, 2",)
    assert find_source(run_dir, step=1000, job=None).global_step == 1000


def test_another_checkpoint_that_was_best_is_said(run_dir: Path) -> None:
    description = description_json(keep_best={"metric": "auc", "lower": False})
    job = {"job": str(run_dir.parent.parent / "job.py"), "description": description}
    (run_dir / "job.json").write_text(json.dumps(job))
    with Store(run_dir / LEDGER) as store:
        for step, auc in ((0, 0.5), (500, 0.8784), (1000, 0.75)):
            store.put_evaluation(f"epoch-{step}", 1, step, {"auc": auc})
    best = {"epoch": 2, "checkpoint": "checkpoints/step-00000500", "restored": False}
    (run_dir / "summary.json").write_text(json.dumps({"phase": "done", "best": best}))
    source = find_source(run_dir, step=None, job=None)
    assert source.global_step == 1000
    assert source.remarks == (
        "step-00001000 is the newest checkpoint; step 500 was best (auc 0.8784); --step 500 "
        "takes it",
    )
    assert find_source(run_dir, step=500, job=None).remarks == ()
    with Store(run_dir / LEDGER) as store:
        store.put_evaluation("final", 1, 1000, {"auc": 0.9})
    assert find_source(run_dir, step=None, job=None).remarks == ()


def test_a_best_epoch_that_is_damaged_is_not_passed_over_in_silence(run_dir: Path) -> None:
    say_best(run_dir, "checkpoints/step-00000500")
    (run_dir / "checkpoints" / "step-00000500" / "shard-0").write_bytes(b"501")
    with pytest.raises(CheckpointError, match=r"the best epoch, 2, cannot be used: .*--step"):
        find_source(run_dir, step=None, job=None)


def test_a_best_epoch_is_looked_for_among_the_runs_checkpoints_alone(run_dir: Path) -> None:
    say_best(run_dir, "../../elsewhere/step-00000500")
    assert find_source(run_dir, step=None, job=None).checkpoint.parent == run_dir / "checkpoints"
    say_best(run_dir, "..")
    with pytest.raises(CheckpointError, match="the best epoch, 2, cannot be used"):
        find_source(run_dir, step=None, job=None)
