"""``coordinator checkpoint ls|verify|diff|prune``, as a person calls it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from coordinator.cli.__main__ import main
from coordinator.records.run_directory import LEDGER, RunDirectory
from coordinator.records.store import Store
from psrpc.checkpoint.manifest import read_manifest
from tests.coordinator.builders import description_json
from tests.psrpc.builders import plan_of, state_of, write


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that keeps two checkpoints and the best one, and has four: step 10 was best."""
    # What is no terminal is as wide as names are long.
    monkeypatch.setenv("COLUMNS", "20")
    description = description_json(
        keep_checkpoints=2, keep_best={"metric": "accuracy", "lower": False}
    )
    (tmp_path / "job.json").write_text(json.dumps({"job": "job.py", "description": description}))
    for step in (5, 10, 20, 30):
        write(tmp_path / "checkpoints", plan_of(2), step=step)
    with Store(tmp_path / LEDGER) as store:
        for step, accuracy in ((5, 0.25), (10, 0.75), (20, 0.5)):
            store.put_evaluation(f"epoch-{step}", 1, step, {"accuracy": accuracy})
    return tmp_path


def call(*arguments: object) -> int:
    return main(["checkpoint", *map(str, arguments)])


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_ls_lists_the_newest_first_and_marks_the_best(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run_dir / "checkpoints" / "step-00000020"
    manifest = read_manifest(directory)
    now = datetime.now(UTC).isoformat()
    (directory / "manifest.json").write_bytes(
        replace(manifest, details={"written_utc": now}).to_json()
    )
    (run_dir / "checkpoints" / "step-00000005" / "manifest.json").unlink()
    assert call("ls", run_dir) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        f"step-{step:08d}" for step in (30, 20, 10, 5)
    ]
    assert lines[1].split() == ["step-00000030", "1", "30", "0.0", "MB", "newest"]
    assert " s ago" in lines[2]
    assert lines[3].rstrip().endswith("best")
    assert "has no manifest.json" in lines[4]


def test_ls_as_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("ls", "--json", run_dir) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["global_step"] for row in rows] == [30, 20, 10, 5]
    assert [row["marks"] for row in rows] == [["newest"], [], ["best"], []]
    assert [row["score"] for row in rows] == [None, 0.5, 0.75, 0.25]
    size = sum(f.stat().st_size for f in (run_dir / "checkpoints/step-00000030").glob("shard*"))
    assert rows[0]["nbytes"] == size
    assert rows[0]["age_s"] is None


def test_ls_while_a_coordinator_has_the_ledger_open(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(run_dir / LEDGER) as store:
        store.put_evaluation("epoch-30", 1, 30, {"accuracy": 0.875})
        assert call("ls", "--json", run_dir) == 0
    assert json.loads(capsys.readouterr().out)[0]["marks"] == ["newest", "best"]


def test_verify_has_a_line_for_every_file(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("verify", run_dir) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 * 2 + 1
    assert lines[0] == "step-00000030/shard-0-of-2.safetensors  good"
    assert lines[-1] == "the newest good one is step-00000030"

    damage(run_dir / "checkpoints" / "step-00000030" / "shard-1-of-2.safetensors")
    damage(run_dir / "checkpoints" / "step-00000010" / "manifest.json")
    assert call("verify", run_dir) == 1
    out = capsys.readouterr().out
    assert "step-00000030/shard-0-of-2.safetensors  good\n" in out
    assert "shard-1-of-2.safetensors has SHA-256" in out
    assert "manifest.json is not a manifest: its SHA-256 is not that of its text" in out
    assert out.endswith("the newest good one is step-00000020\n")


def test_verify_of_one(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run_dir / "checkpoints" / "step-00000010"
    assert call("verify", one) == 0
    damage(one / "shard-0-of-2.safetensors")
    assert call("verify", one) == 1
    assert capsys.readouterr().out.endswith("the newest good one is none\n")


def test_diff_of_equals_whatever_the_number_of_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (write(tmp_path / str(k), plan_of(k)) for k in (1, 3))
    assert call("diff", one, one) == 0
    # Five variables, four slots, and the iterations.
    assert capsys.readouterr().out == "10 equal, 0 different arrays\n"
    assert call("diff", one, two) == 1
    assert capsys.readouterr().out.splitlines()[0] == "shards: 1 and 3"


def test_diff_takes_names_of_checkpoints_of_a_run(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    named = ("diff", "step-00000010", "step-00000020")
    assert call(*named, "--run-dir", run_dir) == 1
    (run_dir / "runs").mkdir()
    (run_dir / "runs/one").symlink_to(run_dir)
    monkeypatch.chdir(run_dir)
    assert call(*named) == 1
    assert capsys.readouterr().out.splitlines().count("global step: 10 and 20") == 2
    assert call("diff", "step-00000010", "gone") == 2
    assert "checkpoints/gone has no manifest.json" in capsys.readouterr().err


def test_diff_names_what_differs_and_by_how_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    plan = plan_of(1)
    before = state_of(
        plan, 0, version=3, applied=[{"epoch": 0, "applied": [[0, 40]], "skipped": []}]
    )
    after = state_of(
        plan,
        0,
        version=4,
        applied=[{"epoch": 0, "applied": [[0, 20], [30, 70]], "skipped": [[30, 40]]}],
    )
    (piece,) = (s for s in plan.shard_slices(plan.arenas[0], 0) if s.variable.name == "dense/bias")
    after.values["float32.trainable"][piece.offset : piece.offset + 2] += [3, -4]
    after.elements["momentum"]["float32.trainable"][piece.offset] += 2
    one = write(tmp_path / "a", plan, step=5, states=[before])
    two = write(tmp_path / "b", plan, step=6, states=[after])
    assert call("diff", one, two) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "global step: 5 and 6",
        "versions: [3] and [4]",
        "epoch 1: 40 and 60 positions applied, 30 in both",
        "epoch 1: 0 and 10 positions skipped, 0 in both",
    ]
    rows = [line.split() for line in lines[5:]]
    assert rows[0] == ["dense/bias", "[40]", "5", "4"]
    assert rows[1] == ["momentum", "of", "dense/bias", "[40]", "2", "2"]
    assert rows[2] == ["iterations", "[]", "1", "1"]
    assert lines[-1] == "7 equal, 3 different arrays"


def test_prune_keeps_the_newest_and_the_best(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("prune", "--dry-run", run_dir) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step-00000005  would be removed",
        "3 left",
    ]
    assert len(names(run_dir)) == 4
    assert call("prune", run_dir) == 0
    assert capsys.readouterr().out.splitlines() == ["step-00000005  removed", "3 left"]
    assert names(run_dir) == [f"step-{step:08d}" for step in (10, 20, 30)]
    assert call("prune", "--keep", "1", run_dir) == 0
    assert names(run_dir) == ["step-00000010", "step-00000030"]


def test_prune_removes_nothing_for_the_sake_of_one_that_is_damaged(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run_dir / "checkpoints" / "step-00000030" / "shard-0-of-2.safetensors")
    assert call("prune", "--keep", "1", run_dir) == 0
    assert names(run_dir) == [f"step-{step:08d}" for step in (10, 20, 30)]
    assert "warning: a checkpoint is damaged: " in capsys.readouterr().err


def test_prune_refuses_while_a_coordinator_runs(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDirectory(run_dir, resume=True):
        assert call("prune", run_dir) == 2
    assert "another coordinator is running on" in capsys.readouterr().err
    assert len(names(run_dir)) == 4


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("ls", "gone"), "error PS404: gone has no checkpoints/; expected the directory of a run"),
        (("verify", "gone"), "gone has no checkpoints/; expected the directory of a run"),
        (("diff", "gone", "gone"), "gone has no manifest.json: it is not a checkpoint"),
        (("prune", "--keep", "0", "."), "error PS110: --keep is 0; expected a whole number"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*arguments) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
