"""Tables of a checkpoint as files of ids and rows; no TensorFlow, and no job file."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from coordinator.checkpoints.pruning import Pruner
from coordinator.cli import export as export_cli
from coordinator.cli.checkpoint import list_checkpoints
from coordinator.cli.checkpoint import run as run_checkpoint
from coordinator.cli.checkpoint_options import add_arguments as add_checkpoint_arguments
from coordinator.export import export
from coordinator.export.checkpoint_diff import diff_checkpoints
from coordinator.export.tables import export_tables, table_file_name
from psrpc.checkpoint.choice import find_checkpoints
from psrpc.checkpoint.directory import verify
from psrpc.checkpoint.manifest import read_manifest
from psrpc.checkpoint.rows_chain import load_rows
from psrpc.checkpoint.shard_file import ShardState
from psrpc.core.placement import make_plan
from psrpc.core.plan import AVERAGES, VariableSpec
from psrpc.core.tables import TableSpec
from tests.psrpc.rows import (
    ADAM,
    SLOTS,
    UNIFORM,
    VARIABLES,
    DictTable,
    chain,
    mine,
    plan_of,
    restored,
    rows_of,
    write_checkpoint,
)


def run_dir_of(root: Path, shards: int = 2) -> tuple[Path, list[Path], list[DictTable]]:
    directories, tables = chain(root / "run" / "checkpoints", plan_of(shards))
    return root / "run", directories, tables


def export_run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    export_cli.add_arguments(parser)
    return export.run(parser.parse_args(arguments))


def checkpoint_run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_checkpoint_arguments(parser)
    return run_checkpoint(parser.parse_args(arguments))


@pytest.mark.parametrize("shards", [1, 3])
def test_every_table_by_ascending_id(
    tmp_path: Path, shards: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _, tables = run_dir_of(tmp_path, shards)
    assert export_run(str(run), "--tables", str(tmp_path / "out" / "tables")) == 0
    said = capsys.readouterr().err
    for table in tables:
        path = tmp_path / "out" / "tables" / table_file_name(table.spec.name)
        assert f"wrote {path} from {run}/checkpoints/step-00000030 (step 30): " in said
        found = load_file(path)
        assert found["ids"].tolist() == sorted(table.rows)
        expected = [table.rows[id_].values for id_ in sorted(table.rows)]
        np.testing.assert_array_equal(found["rows"], expected)
        with safe_open(path, "numpy") as file:
            metadata = json.loads(file.metadata()["psrpc"])
        assert metadata["table"]["name"] == table.spec.name
        assert metadata["global_step"] == 30
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "items%2Fnew.safetensors",
        "model.safetensors",
        "user.safetensors",
    ]


def test_the_tables_of_an_earlier_step(tmp_path: Path) -> None:
    run, directories, _ = run_dir_of(tmp_path)
    assert export_run(str(run), "--step", "10", "--tables", str(tmp_path / "out")) == 0
    first = load_file(tmp_path / "out" / "user.safetensors")
    assert -20 in first["ids"]
    assert 77 not in first["ids"]
    export_tables(directories[1], read_manifest(directories[1]), tmp_path / "out")
    second = load_file(tmp_path / "out" / "user.safetensors")
    assert -20 not in second["ids"]
    assert 77 in second["ids"]


def test_the_other_variables_by_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = [DictTable(TableSpec("model", 3, None, UNIFORM, ADAM), SLOTS[0])]
    variables = [
        VariableSpec("dense/kernel", (3, 5), "float32", "trainable"),
        VariableSpec("mean/variable", (), "float64", "trainable"),
        VariableSpec("moving", (2,), "float32", "state"),
    ]
    plan = make_plan(variables, 2, "cut", [table.spec for table in tables])
    tables[0].touch([4, 1 << 50], 3)
    arenas = {a.name: np.arange(a.length, dtype=a.dtype) + 1 for a in plan.arenas}
    averages = {name: -values for name, values in arenas.items() if "trainable" in name}
    states = []
    for shard in range(2):
        cut = {a.name: slice(a.cuts[shard], a.cuts[shard + 1]) for a in plan.arenas}
        states.append(
            ShardState(
                {name: values[cut[name]] for name, values in arenas.items()},
                elements={AVERAGES: {name: v[cut[name]] for name, v in averages.items()}},
                version=30,
            )
        )
    directory = write_checkpoint(tmp_path, plan, tables, 30, states=states)
    to = tmp_path / "out"
    assert export_run(str(directory), "--tables", str(to)) == 0
    found = load_file(to / "model.safetensors")
    assert {n: (a.dtype.name, a.shape) for n, a in found.items()} == {
        v.name: (v.dtype, v.shape) for v in variables
    }
    # Averages are what Keras keeps of the trained ones.
    np.testing.assert_array_equal(found["dense/kernel"], -np.arange(1, 16).reshape(3, 5))
    assert found["mean/variable"] == -1
    np.testing.assert_array_equal(found["moving"], [1, 2])
    said = capsys.readouterr().err
    assert f"wrote {to}/model.safetensors from {directory} (step 30): 3 other variables, 18" in said
    # A table of that name has another.
    assert sorted(p.name for p in to.iterdir()) == ["%6Dodel.safetensors", "model.safetensors"]
    assert load_file(to / "%6Dodel.safetensors")["ids"].tolist() == [4, 1 << 50]


def test_nothing_to_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, directories, _ = run_dir_of(tmp_path)
    assert export_run(str(run)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error PS113: nothing to export; say --to PATH, --tables")
    (directories[0] / "rows-0-of-2-0.safetensors").write_bytes(b"")
    assert export_run(str(run), "--tables", str(tmp_path / "out")) == 2
    assert "no good checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    run, *_ = run_dir_of(tmp_path / "other")
    assert export_run(str(run), "--tables", str(tmp_path / "file")) == 2
    assert "user.safetensors cannot be written: " in capsys.readouterr().err


def test_a_run_without_tables_has_variables_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(VARIABLES, 1, "cut")
    directory = write_checkpoint(tmp_path / "run" / "checkpoints", plan, (), 10)
    assert export_run(str(directory), "--tables", str(tmp_path / "out")) == 0
    remark, wrote = capsys.readouterr().err.splitlines()
    assert remark == f"{directory} has no embedding tables; it has variables alone"
    assert wrote.endswith(" (step 10): 1 variable, 4 elements")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"bias"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_ls_shows_rows_and_every_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, directories, tables = run_dir_of(tmp_path)
    assert checkpoint_run("ls", str(run)) == 0
    said = capsys.readouterr().out
    sizes = {table.spec.name: len(table.rows) for table in tables}
    assert f"user {sizes['user']}, items/new {sizes['items/new']}" in said
    found = find_checkpoints(run / "checkpoints")
    newest, *_, oldest = list_checkpoints(found, None, run, datetime.now(UTC))
    assert newest["tables"] == sizes
    assert oldest["tables"] == {"user": 42, "items/new": 30}
    there = sum(p.stat().st_size for p in directories[-1].iterdir() if p.suffix != ".json")
    assert newest["nbytes"] == there


def test_verify_reads_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, directories, _ = run_dir_of(tmp_path)
    assert checkpoint_run("verify", str(run)) == 0
    said = capsys.readouterr().out
    assert "step-00000030/rows-1-of-2-0.safetensors and 2 more  good" in said
    assert "step-00000010/rows-1-of-2-0.safetensors  good" in said
    path = directories[-1] / "rows-1-of-2-2.safetensors"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1] + b"\x55")
    assert checkpoint_run("verify", str(run)) == 1
    said = capsys.readouterr().out
    assert "rows-1-of-2-2.safetensors has SHA-256" in said
    assert "the newest good one is step-00000020" in said


def test_diff_compares_rows(tmp_path: Path) -> None:
    _, directories, tables = run_dir_of(tmp_path)
    difference = diff_checkpoints(directories[1], directories[2])
    assert "table user: 41 and 41 rows, 40 in both" in difference.facts
    changed = {row.name for row in difference.arrays}
    assert {"rows of items/new", "accumulator of items/new"} <= changed
    whole = write_checkpoint(tmp_path / "whole", plan_of(3), tables, 30)
    again = diff_checkpoints(directories[2], whole)
    assert [fact for fact in again.facts if "table" in fact] == []
    assert not again.arrays
    assert "shards: 2 and 3" in again.facts


def test_pruning_harms_no_checkpoint_that_continues_another(tmp_path: Path) -> None:
    run, directories, tables = run_dir_of(tmp_path)
    assert Pruner(run / "checkpoints", 1, None).prune({}) == ()
    assert [path for path in directories if path.exists()] == directories[-1:]
    verify(directories[-1], read_manifest(directories[-1]))
    for shard in range(2):
        found = restored(load_rows(directories[-1], plan_of(2), shard))
        assert rows_of(found) == rows_of(mine(tables, shard, 2))
