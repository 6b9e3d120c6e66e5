"""Rows of tables in checkpoints: parts that make a whole, for any number of shards."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from psrpc.checkpoint import rows_file, rows_reader
from psrpc.checkpoint.checkpoint import newest_good, read_manifest, verify
from psrpc.checkpoint.directory import remove_checkpoint
from psrpc.checkpoint.load import load_state
from psrpc.checkpoint.manifest import MANIFEST
from psrpc.checkpoint.rows_chain import (
    Removed,
    SavedCandidates,
    check_chain,
    fill_rows,
    load_rows,
    load_table,
    table_ids,
)
from psrpc.checkpoint.rows_reader import RowsBlock, RowsReader
from psrpc.checkpoint.safetensors_form import header_bytes, parse_safetensors_header
from psrpc.checkpoint.shard_file import NDArray
from psrpc.core.errors import CheckpointError
from psrpc.core.placement import make_plan
from psrpc.files.storage import Disk
from tests.psrpc.rows import (
    TABLES,
    VARIABLES,
    chain,
    mine,
    plan_of,
    restored,
    rows_of,
    tables_of,
    trained,
    write_checkpoint,
)


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_any_number_of_shards_loads_into_any_other(
    tmp_path: Path, before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_reader, "READ_NBYTES", 300)
    monkeypatch.setattr(rows_file, "WRITE_NBYTES", 50)
    directories, tables = chain(tmp_path, plan_of(before))
    for shard in range(after):
        found = restored(load_rows(directories[-1], plan_of(after), shard))
        assert rows_of(found) == rows_of(mine(tables, shard, after))
        assert all(table.rows for table in found)


def test_every_checkpoint_of_a_chain_is_whole(tmp_path: Path) -> None:
    """Also when those before it are gone."""
    plan = plan_of(2)
    base: Path | None = None
    for step, tables in trained():
        directory = write_checkpoint(tmp_path, plan, tables, step, base)
        if base is not None:
            remove_checkpoint(base)
        verify(directory, read_manifest(directory))
        for shard in range(2):
            found = restored(load_rows(directory, plan, shard))
            assert rows_of(found) == rows_of(mine(tables, shard, 2))
        base = directory
    whole = write_checkpoint(tmp_path / "whole", plan, tables, 30)
    assert len(read_manifest(directory).files[0].rows) == 3
    assert len(read_manifest(whole).files[0].rows) == 1
    for shard in range(2):
        both = [restored(load_rows(d, plan, shard)) for d in (directory, whole)]
        assert rows_of(both[0]) == rows_of(both[1])


def test_blocks_are_small_whatever_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_reader, "READ_NBYTES", 400)
    directories, _ = chain(tmp_path, plan_of(1))
    blocks = [step for _, step in load_rows(directories[-1], plan_of(1), 0)]
    sizes = [step.ids.size for step in blocks if isinstance(step, RowsBlock)]
    assert max(sizes) <= 400 // 24
    assert len(sizes) > 5
    assert any(isinstance(step, Removed) for step in blocks)
    assert any(isinstance(step, SavedCandidates) for step in blocks)


def test_a_part_is_plain_safetensors(tmp_path: Path) -> None:
    (_, second, _), _ = chain(tmp_path, plan_of(1))
    found = load_file(second / "rows-0-of-1-1.safetensors")
    assert sorted(found["table/user/ids"].tolist()) == [-19, 0, 1, 2, 4, 77]
    assert sorted(found["table/user/removed"].tolist()) == [-20, -19, 3]
    assert found["table/user/values"].shape == (6, 3)
    assert found["table/user/slot/m"].dtype == np.float32
    assert found["table/user/candidates/counts"].tolist() == [3, 1]
    assert found["table/user/candidates/touched"].tolist() == [11, 20]
    assert found["table/items/new/slot/accumulator"].shape == (0, 1)
    assert found["table/items/new/touched"].dtype == np.uint32


def _as_format_1(data: bytes) -> bytes:
    """A part as it was written before candidates had versions."""
    length = int.from_bytes(data[:8], "little")
    metadata, placed = parse_safetensors_header(data[8 : 8 + length], len(data) - 8 - length)
    kept = [tensor for tensor in placed if not tensor.name.endswith("/candidates/touched")]
    assert len(placed) - len(kept) == len(TABLES)
    bodies = (data[8 + length + t.start :][: t.nbytes] for t in kept)
    return header_bytes(metadata | {"format": 1}, kept) + b"".join(bodies)


def _rewritten(directory: Path, change: Callable[[bytes], bytes]) -> None:
    """Changes a checkpoint's part 0, of shard 0, and seals it."""
    manifest = read_manifest(directory)
    (file,) = manifest.files
    (entry,) = file.rows
    data = change((directory / entry.name).read_bytes())
    (directory / entry.name).unlink()  # the others' links stay as they are
    (directory / entry.name).write_bytes(data)
    entry = replace(entry, nbytes=len(data), sha256=sha256(data).hexdigest())
    changed = replace(manifest, files=(replace(file, rows=(entry,)),))
    (directory / MANIFEST).write_bytes(changed.to_json())


def test_a_checkpoint_of_before_candidates_had_versions_loads(tmp_path: Path) -> None:
    directory, *_ = chain(tmp_path, plan_of(1))[0]
    plans = [(plan_of(shards), shard) for shards in (1, 2) for shard in range(shards)]
    now = [restored(load_rows(directory, *where)) for where in plans]
    _rewritten(directory, _as_format_1)
    verify(directory, read_manifest(directory))
    before = [restored(load_rows(directory, *where)) for where in plans]
    assert any(table.candidates for tables in now for table in tables)
    for tables in now:
        for table in tables:
            table.candidates = {i: (count, 0) for i, (count, _) in table.candidates.items()}
    assert [rows_of(tables) for tables in before] == [rows_of(tables) for tables in now]


@pytest.mark.parametrize("format_", [0, 1, 3, "2", None])
def test_a_part_has_what_its_format_says(tmp_path: Path, format_: object) -> None:
    directory, *_ = chain(tmp_path, plan_of(1))[0]

    def other(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        metadata, placed = parse_safetensors_header(data[8 : 8 + length], len(data) - 8 - length)
        return header_bytes(metadata | {"format": format_}, placed) + data[8 + length :]

    _rewritten(directory, other)
    expected = "candidates/touched.* are unknown" if format_ == 1 else "format is .* from 1 to 2"
    with pytest.raises(CheckpointError, match=expected):
        list(load_rows(directory, plan_of(1), 0))


def test_every_tensor_lies_aligned(tmp_path: Path) -> None:
    directories, _ = chain(tmp_path, plan_of(1))
    data = (directories[0] / "rows-0-of-1-0.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, tensor in header.items():
        if name != "__metadata__":
            itemsize = 8 if tensor["dtype"] == "I64" else 4
            assert (8 + length + tensor["data_offsets"][0]) % itemsize == 0, name


def test_a_whole_table_by_ascending_id(tmp_path: Path) -> None:
    directories, tables = chain(tmp_path, plan_of(3))
    user = tables[0]
    found = load_table(directories[-1], "user")
    assert found.ids.tolist() == sorted(user.rows)
    for n, id_ in enumerate(found.ids.tolist()):
        row = user.rows[id_]
        np.testing.assert_array_equal(found.values[n], row.values)
        np.testing.assert_array_equal(found.slots["v"][n], row.slots["v"])
        assert (found.counts[n], found.touched[n]) == (row.count, row.touched)
    ids = table_ids(directories[-1], "items/new")
    into = np.zeros((ids.size, 2), np.float32)
    fill_rows(directories[-1], "items/new", ids, into)
    np.testing.assert_array_equal(into, [tables[1].rows[i].values for i in ids.tolist()])
    with pytest.raises(CheckpointError, match="has no table 'x'; it has user, items/new"):
        load_table(directories[-1], "x")


def test_a_table_that_is_empty(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, plan_of(2), tables_of(), 0)
    assert load_table(directory, "user").values.shape == (0, 3)
    for shard in range(3):
        assert not any(t.rows for t in restored(load_rows(directory, plan_of(3), shard)))


def test_a_manifest_without_tables_says_nothing_of_rows(tmp_path: Path) -> None:
    plan = make_plan(VARIABLES, 1, "cut")
    directories, _ = chain(tmp_path, plan_of(1))
    manifest = read_manifest(directories[-1])
    assert type(manifest).from_json(manifest.to_json()) == manifest
    bare = replace(manifest, plan=plan, files=(replace(manifest.files[0], rows=()),))
    document = json.loads(bare.to_json())
    assert document["files"][0].keys() == {"shard", "name", "nbytes", "sha256", "version"}
    assert type(manifest).from_json(bare.to_json()) == bare


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 4}, "table 'user' with width 3; the job has it with 4"),
        ({"seed": 2}, "table 'user' with seed 1; the job has it with 2"),
        ({"vocabulary": 5}, "table 'user' with vocabulary None; the job has it with 5"),
        (
            {"optimizer": {"class_name": "SGD", "config": {}}},
            r"'user' with optimizer 'Adam'; the job has it with 'SGD' \(its own, or the job's",
        ),
        (
            {"optimizer": {"class_name": "Adam", "config": {"amsgrad": True}}},
            "table 'user' with optimizer 'Adam'; the job has it with 'Adam with amsgrad'",
        ),
        (
            {"initializer": {"class_name": "constant", "config": {"value": 0.0}}},
            "table 'user' with initializer .*uniform.*; the job has it with .*constant",
        ),
        ({"name": "users"}, "has table 'user'; the job has none of that name"),
    ],
)
def test_a_table_that_was_redefined_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    directories, _ = chain(tmp_path, plan_of(1))
    plan = plan_of(1, (replace(TABLES[0], **change), TABLES[1]))
    with pytest.raises(CheckpointError, match=message):
        load_state(directories[-1], plan, 0)
    with pytest.raises(CheckpointError, match=message):
        list(load_rows(directories[-1], plan, 0))


def test_settings_without_influence_on_rows_may_change_and_tables_may_be_new(
    tmp_path: Path,
) -> None:
    directories, tables = chain(tmp_path, plan_of(2))
    slower = {"class_name": "Adam", "config": {"learning_rate": 0.01}}
    user = replace(TABLES[0], optimizer=slower, min_count=3, max_rows=10**6, eviction="age")
    new = replace(TABLES[0], name="new", width=9)
    plan = plan_of(2, (new, TABLES[1], user))
    for shard in range(2):
        load_state(directories[-1], plan, shard)
        found: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
        for number, step in load_rows(directories[-1], plan, shard):
            if isinstance(step, RowsBlock):
                found[number].update(step.ids.tolist())
        assert not found[0]
        own = mine(tables, shard, 2)
        assert found[2] >= own[0].rows.keys()
        assert found[1] >= own[1].rows.keys()


def flip(data: bytes) -> bytes:
    at = len(data) - 5
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "has SHA-256"),
        (lambda data: data[:-1], "bytes; expected"),
        (lambda data: data + b"\0", "bytes; expected"),
        (lambda _: None, "cannot be read"),
    ],
)
def test_damage_in_any_part_is_found_before_anything_of_it_is_given(
    tmp_path: Path, part: int, damage: Callable[[bytes], bytes | None], message: str
) -> None:
    directories, _ = chain(tmp_path, plan_of(1))
    directory = directories[-1]
    path = directory / f"rows-0-of-1-{part}.safetensors"
    data = damage(path.read_bytes())
    path.unlink()  # the others' links stay as they are
    if data is not None:
        path.write_bytes(data)
    manifest = read_manifest(directory)
    given: list[tuple[int, Any]] = []
    with pytest.raises(CheckpointError, match=message) as raised:
        given.extend(load_rows(directory, plan_of(1), 0))
    assert path.name in str(raised.value)
    touched = [step.touched.max() for _, step in given if isinstance(step, RowsBlock)]
    assert max(touched, default=0) <= part * 10
    for reading in (
        lambda: verify(directory, manifest),
        lambda: check_chain(directory, manifest, manifest.files[0]),
        lambda: load_table(directory, "user"),
        lambda: list(load_rows(directory, plan_of(2), 0)),
    ):
        with pytest.raises(CheckpointError, match=message):
            reading()
    choice = newest_good(tmp_path)
    assert choice.directory == directories[1]
    assert path.name in dict(choice.refused)[directory]


def test_parts_that_changed_places_are_not_what_the_manifest_means(tmp_path: Path) -> None:
    """Even with a manifest sealed over them."""
    plan = plan_of(2)
    directories, tables = chain(tmp_path, plan)
    directory = directories[-1]
    manifest = read_manifest(directory)
    one, two = manifest.files

    def seal(*rows: Any) -> None:
        changed = replace(manifest, files=(replace(one, rows=rows), two))
        (directory / MANIFEST).write_bytes(changed.to_json())

    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            list(load_rows(directory, plan, 0))

    for rows in ((), one.rows[1:], (*one.rows, one.rows[0]), (one.rows[0], one.rows[2])):
        seal(*rows)
        refused("of shard 0's rows; expected")
    seal(*one.rows[:2])
    refused("is of global_step 20; its manifest says 30")
    # The files themselves, with their own sizes and digests, under each other's names.
    names = [entry.name for entry in one.rows]
    first, second = (replace(one.rows[n], name=names[1 - n]) for n in (0, 1))
    _swap(directory / names[0], directory / names[1])
    seal(second, first, one.rows[2])
    refused("is of part 1; its manifest says 0")
    _swap(directory / names[0], directory / names[1])
    other = write_checkpoint(tmp_path / "other", plan, tables, 20, None)
    (directory / names[0]).unlink()
    (other / names[0]).rename(directory / names[0])
    foreign = read_manifest(other).files[0].rows[0]
    seal(foreign, *one.rows[1:])
    refused(r"0-1\.safetensors is of after|1\.safetensors is of after")


def _swap(one: Path, other: Path) -> None:
    spare = one.rename(one.with_name("spare"))
    other.rename(one)
    spare.rename(other)


def test_a_file_that_changes_between_two_looks_is_refused(tmp_path: Path) -> None:
    directories, _ = chain(tmp_path, plan_of(1))
    entry = read_manifest(directories[0]).files[0].rows[0]
    path = directories[0] / entry.name
    file = io.BytesIO(path.read_bytes())

    class Held(Disk):
        def open(self, path: Path) -> io.BufferedIOBase:
            return file

    with RowsReader(path, entry.nbytes, entry.sha256, Held()) as reader:
        reader.check()
        assert [list(reader.blocks(table)) for table in (0, 1)]
        file.getbuffer()[-300:] = bytes(300)
        with pytest.raises(CheckpointError, match="has changed while it was read"):
            [list(reader.blocks(table)) for table in (0, 1)]


@pytest.mark.parametrize(
    "name", ["values", "ids", "slot/accumulator", "candidates/counts", "candidates/touched"]
)
def test_a_header_that_does_not_fit_its_tensors_is_refused(tmp_path: Path, name: str) -> None:
    """Even with a valid digest."""
    directories, _ = chain(tmp_path, plan_of(1))
    path = directories[0] / "rows-0-of-1-0.safetensors"
    for change in ("dtype", "shape"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        document = json.loads(data[8 : 8 + length])
        tensor = document[f"table/items/new/{name}"]
        if change == "dtype":
            tensor["dtype"] = {"I64": "F64", "F32": "I32", "U32": "I32"}[tensor["dtype"]]
        else:
            tensor["shape"] = [1, *tensor["shape"]]
        text = json.dumps(document, separators=(",", ":")).encode().ljust(length + 16)
        changed = len(text).to_bytes(8, "little") + text + data[8 + length :]
        broken = tmp_path / f"{change}.safetensors"
        broken.write_bytes(changed)
        with pytest.raises(CheckpointError, match="is not a file of rows"):
            RowsReader(broken, len(changed), "")


def test_a_disk_that_is_full_while_a_part_is_written(tmp_path: Path) -> None:
    class Full(Disk):
        def write(self, path: Path, parts: Any) -> Any:
            if path.name != "rows-0-of-1-1.safetensors":
                return super().write(path, parts)
            path.write_bytes(next(iter(parts)))
            raise OSError(28, "No space left on device")

    steps = trained()
    step, tables = next(steps)
    first = write_checkpoint(tmp_path, plan_of(1), tables, step)
    before = restored(load_rows(first, plan_of(1), 0))
    step, tables = next(steps)
    with pytest.raises(CheckpointError, match=r"rows-0-of-1-1\S* cannot be written: No space"):
        write_checkpoint(tmp_path, plan_of(1), tables, step, first, Full())
    assert newest_good(tmp_path).directory == first
    assert rows_of(restored(load_rows(first, plan_of(1), 0))) == rows_of(before)


def test_blocks_of_a_column_are_asked_for_in_order(tmp_path: Path) -> None:
    asked: list[tuple[str, int, int]] = []
    table = tables_of()[0]
    table.touch(range(100), 1)
    part = table.part(0, 1)

    def read(column: str, start: int, stop: int) -> NDArray:
        asked.append((column, start, stop))
        return part.read(column, start, stop)

    header = rows_file.RowsHeader(0, 1, "", "r", 1, 1, 1, 0, "", TABLES[:1], [table.slots], [100])
    rows_file.write_rows_file(tmp_path / "x", header, [replace(part, read=read)])
    assert [column for column, *_ in asked] == [
        "ids",
        "values",
        "slot/m",
        "slot/v",
        "counts",
        "touched",
    ]
    assert all((start, stop) == (0, 100) for _, start, stop in asked)
