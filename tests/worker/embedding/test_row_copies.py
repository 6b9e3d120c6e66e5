"""Files of rows in a changed copy of a checkpoint: the same files, or rows of another run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from psrpc.checkpoint.directory import verify
from psrpc.checkpoint.manifest import ManifestFile, read_manifest
from psrpc.checkpoint.rows_chain import load_rows, table_sizes
from psrpc.core.plan import Plan
from tests.psrpc.rows import (
    DictTable,
    chain,
    mine,
    plan_of,
    restored,
    rows_of,
    tables_of,
    write_checkpoint,
)
from worker.embedding.row_copies import link_checkpoint, link_rows, write_rows
from worker.embedding.trained import load_table_state

pytestmark = pytest.mark.slow


def rewritten(begun: Path, trained: Path, plan: Plan, keep_slots: bool) -> None:
    """Gives the checkpoint ``begun`` the rows of ``trained`` in place of its own."""
    manifest = read_manifest(begun)
    states = {table.name: load_table_state(trained, table.name) for table in plan.tables}
    for path in begun.glob("rows-*-0.safetensors"):
        path.rename(begun / f"old-{path.name}")
    files: list[ManifestFile] = []
    for file in manifest.files:
        (entry,) = file.rows
        old = replace(file, rows=(replace(entry, name=f"old-{entry.name}"),))
        written = write_rows(begun, manifest, old, states, begun, keep_slots=keep_slots)
        files.append(written)
    changed = replace(manifest, files=tuple(files))
    (begun / "manifest.json").write_bytes(changed.to_json())
    verify(begun, changed)


@pytest.mark.parametrize("shards", [1, 3])
def test_rows_of_another_run_go_on_in_any_number_of_shards(tmp_path: Path, shards: int) -> None:
    checkpoints, tables = chain(tmp_path / "one", plan_of(2))
    plan = plan_of(shards)
    begun = write_checkpoint(tmp_path / "two", plan, tables_of(), 0, run="another")
    rewritten(begun, checkpoints[-1], plan, keep_slots=True)
    for shard in range(shards):
        found = restored(load_rows(begun, plan, shard, "another"))
        assert rows_of(found) == rows_of(mine(tables, shard, shards))
    sizes = {table.spec.name: len(table.rows) for table in tables}
    assert table_sizes(begun, read_manifest(begun)) == sizes


def test_slots_of_another_optimizer_begin_anew(tmp_path: Path) -> None:
    checkpoints, tables = chain(tmp_path / "one", plan_of(2))
    adagrad = {"class_name": "Adagrad", "config": {"initial_accumulator_value": 0.5}}
    specs = [replace(table.spec, optimizer=adagrad) for table in tables]
    plan = plan_of(1, specs)
    empty = [DictTable(spec, {"accumulators": spec.width}) for spec in specs]
    begun = write_checkpoint(tmp_path / "two", plan, empty, 0)
    rewritten(begun, checkpoints[-1], plan, keep_slots=True)
    for number, table in enumerate(tables):
        state = load_table_state(begun, table.spec.name)
        assert sorted(table.rows) == state.rows.ids.tolist()
        (slot,) = state.rows.slots.values()
        np.testing.assert_array_equal(slot, np.full((len(table.rows), specs[number].width), 0.5))
        rows = [table.rows[id_].values for id_ in state.rows.ids.tolist()]
        np.testing.assert_array_equal(state.rows.values, rows)


def test_files_of_rows_are_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, _ = chain(tmp_path, plan_of(2))
    manifest = read_manifest(checkpoints[-1])
    (tmp_path / "copy").mkdir()
    for file in manifest.files:
        link_rows(checkpoints[-1], file, tmp_path / "copy")
    names = {entry.name for file in manifest.files for entry in file.rows}
    assert {path.name for path in (tmp_path / "copy").iterdir()} == names
    for name in names:
        assert (tmp_path / "copy" / name).samefile(checkpoints[-1] / name)

    def refuse(*_: object) -> None:
        raise OSError(1, "no links here")

    monkeypatch.setattr("psrpc.files.storage.os.link", refuse)
    kept = tmp_path / "kept" / checkpoints[-1].name
    link_checkpoint(checkpoints[-1], kept)
    verify(kept, read_manifest(kept))
    assert not (kept / sorted(names)[0]).samefile(checkpoints[-1] / sorted(names)[0])
