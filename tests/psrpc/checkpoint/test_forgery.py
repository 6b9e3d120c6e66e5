"""Checkpoints that someone has forged, checksums included, are refused with CheckpointError or
load the parameters and rows that the files hold; nothing else is raised, and nothing is awaited."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psrpc.checkpoint.checkpoint import applied_sets, newest_good, slot_names
from psrpc.checkpoint.load import load_state, load_variables
from psrpc.checkpoint.manifest import MANIFEST, read_manifest
from psrpc.checkpoint.rows_chain import load_rows, load_table, table_sizes
from psrpc.checkpoint.rows_file import rows_file_name
from psrpc.checkpoint.shard_file import shard_file_name
from psrpc.core.document import LARGEST, MOST_CONTAINERS, parse_json
from psrpc.core.errors import CheckpointError
from psrpc.files.storage import open_regular, read_bounded, read_json
from tests.psrpc.checkpoint.test_corruption import (
    NEW,
    OLD,
    PLAN,
    ROOT,
    SHARDS,
    Files,
    Memory,
    pristine,
    rows_at,
    state_of,
)
from tests.psrpc.forging import DEEP, checkpoint, documents, forged, forgeries, on_disk, put
from tests.psrpc.rows import restored, rows_of

SHARD = shard_file_name(0, SHARDS)


def check(files: Files) -> bool:
    """Reads the newest checkpoint in every way; whether all of them took it."""
    disk = Memory(files)
    refused = []
    reads: list[Callable[[], Any]] = [
        lambda: state_is_right(disk),
        lambda: rows_are_right(disk),
        lambda: load_variables(NEW, storage=disk),
        lambda: [applied_sets(NEW, read_manifest(NEW, disk), disk)],
        lambda: [slot_names(NEW, read_manifest(NEW, disk), disk)],
        lambda: [table_sizes(NEW, read_manifest(NEW, disk), disk)],
        lambda: load_table(NEW, PLAN.tables[0].name, disk),
        lambda: newest_good(ROOT, "run-1", storage=disk),
    ]
    for read in reads:
        try:
            read()
        except CheckpointError as error:
            refused.append(str(error))
    assert not [line for line in refused if "\n" in line or str(ROOT) not in line], "one names it"
    return not refused


def state_is_right(disk: Memory) -> None:
    found, expected = load_state(NEW, PLAN, 0, "run-1", disk), state_of(PLAN, 0, 20, "run-1")
    for name, array in expected.values.items():
        np.testing.assert_array_equal(found.values[name], array)


def rows_are_right(disk: Memory) -> None:
    assert rows_of(restored(load_rows(NEW, PLAN, 0, "run-1", disk))) == rows_at(20, 0, SHARDS)


def test_a_genuine_checkpoint_is_taken() -> None:
    for name, document in documents().items():
        files = checkpoint(name, document)
        assert files == pristine(), name
    assert check(files)


@pytest.mark.slow
def test_a_value_in_any_place_is_refused_or_does_no_harm() -> None:
    for what, files in forgeries(seed=1):
        try:
            check(files)
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error


@pytest.mark.parametrize(
    ("name", "place", "value", "words"),
    [
        (MANIFEST, ("global_step",), "20", "global_step is '20'; expected a whole number"),
        (MANIFEST, ("global_step",), True, "global_step is True; expected a whole number"),
        (MANIFEST, ("generation",), -1, "generation is -1; expected a whole number"),
        (MANIFEST, ("generation",), 2**80, "does not fit 64 bits"),
        (MANIFEST, ("details", "x"), DEEP, "nested more than 64 deep"),
        (MANIFEST, ("plan", "shards"), 10**9, "plan is no plan|shards is 1000000000; expected"),
        (MANIFEST, ("plan", "shards"), 60_000, "is not cut over 60000 shards"),
        (MANIFEST, ("plan", "variables", 0, "shape", 0), float("inf"), "Infinity is no JSON"),
        (MANIFEST, ("plan", "variables", 0, "shape", 0), 1 << 60, "expected a whole number"),
        (MANIFEST, ("plan", "variables", 0, "shape"), [1 << 40] * 2, "elements at most"),
        (MANIFEST, ("plan", "arenas", 0, "cuts", 1), 1 << 40, "is not cut over 2 shards"),
        (MANIFEST, ("plan", "tables", 0, "width"), 1 << 40, "width is 1099511627776; expected"),
        (MANIFEST, ("files",), [], "has files of shards"),
        (MANIFEST, ("files", 0, "shard"), 1, "has files of shards"),
        (MANIFEST, ("files", 0, "name"), "../x", "expected a plain file name, not a path"),
        (MANIFEST, ("files", 0, "name"), shard_file_name(1, SHARDS), "for two purposes"),
        (MANIFEST, ("files", 0, "nbytes"), "9", "nbytes is '9'; expected a whole number"),
        (MANIFEST, ("optimizer", "class_name"), [], "class_name is []; expected text"),
        (SHARD, ("variable/kernel", "shape", 0), 1e999, "Infinity is no JSON"),
        (SHARD, ("variable/kernel", "shape", 0), "24", "is '24'; expected a whole number"),
        (SHARD, ("variable/kernel", "shape", 0), -24, "is -24; expected a whole number"),
        (SHARD, ("slot/momentum/kernel", "data_offsets", 0), 0, "does not lie where it can"),
        (SHARD, ("__metadata__", "version"), "20", "version is '20'; expected a whole"),
        (SHARD, ("__metadata__", "applied"), [[]], "applied[0] is []; expected an object"),
        (SHARD, ("__metadata__", "applied", 0, "applied"), [[5, 2]], "expected an interval"),
        (SHARD, ("__metadata__", "entries", "x"), {}, "entries.x has no 'kind'"),
    ],
)
def test_wrong_fields_are_named(name: str, place: tuple[Any, ...], value: Any, words: str) -> None:
    files = checkpoint(name, forged(documents()[name], place, put(value)))
    with pytest.raises(CheckpointError) as caught:
        load_state(NEW, PLAN, 0, "run-1", Memory(files))
    assert any(word in str(caught.value) for word in words.split("|"))
    assert str(NEW / name) in str(caught.value) or "files" in place


def test_elements_that_are_there_twice_are_not_taken_for_those_that_are_missing() -> None:
    """As many as there should be, all of them the first half."""
    header = copy.deepcopy(documents()[SHARD])
    entries, name = header["__metadata__"]["entries"], "variable/kernel"
    start, stop = header[name]["data_offsets"]
    half, first = (start + stop) // 2, entries[name]["start"]
    size = (entries[name]["stop"] - first) // 2
    for part, offsets in ((name, [start, half]), ("twice", [half, stop])):
        header[part] = {"dtype": "F32", "shape": [size], "data_offsets": offsets}
        entries[part] = entries[name] | {"start": first, "stop": first + size}
    with pytest.raises(CheckpointError, match="which shard 0 cannot have"):
        load_state(NEW, PLAN, 0, "run-1", Memory(checkpoint(SHARD, header)))


@pytest.mark.parametrize(
    "text", [b"\xff{}", b"\0" * 64, b"{", b"", b'{"a": 1, "a": 2}', b'"\\ud800"']
)
def test_text_that_is_no_json_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_json(text)


def test_a_document_is_bounded_before_it_is_parsed() -> None:
    with pytest.raises(ValueError, match="brackets; expected"):
        parse_json(b"[" + b"[]," * MOST_CONTAINERS + b"0]")
    with pytest.raises(ValueError, match="bytes; expected"):
        parse_json(bytes(LARGEST + 1))


# -- on a disk ------------------------------------------------------------------------------------


def as_fifo(path: Path) -> None:
    os.mkfifo(path)


def as_directory(path: Path) -> None:
    path.mkdir()


def as_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 3 << 30)


def as_loop(path: Path) -> None:
    path.symlink_to(path)


def as_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


PLACED = [
    (as_fifo, "It is a FIFO; expected a regular file"),
    (as_directory, "It is a directory; expected a regular file"),
    (as_sparse, "has 3221225472 bytes; expected"),
    (as_loop, "Too many levels of symbolic links"),
    (as_device, "It is a device; expected a regular file"),
]
"""What may be in the place of a file, and what is said of it."""


@pytest.mark.parametrize(("place", "words"), PLACED)
@pytest.mark.parametrize("name", [MANIFEST, SHARD, rows_file_name(0, SHARDS, 0)])
def test_a_path_that_is_no_file_is_skipped_at_once(
    tmp_path: Path, name: str, place: Callable[[Path], None], words: str
) -> None:
    on_disk(pristine(), tmp_path)
    checkpoints = tmp_path / ROOT.name
    path = checkpoints / NEW.name / name
    path.unlink()
    place(path)
    choice = newest_good(checkpoints)
    assert choice.directory.name == OLD.name
    ((passed_over, reason),) = choice.refused
    assert passed_over.name == NEW.name
    assert str(path) in reason
    assert words in reason
    with suppress(CheckpointError):
        load_state(path.parent, PLAN, 0)
    with suppress(CheckpointError):
        list(load_rows(path.parent, PLAN, 0))


def test_a_file_that_a_link_leads_to_is_read(tmp_path: Path) -> None:
    on_disk(pristine(), tmp_path)
    directory = tmp_path / ROOT.name / NEW.name
    (directory / SHARD).rename(tmp_path / "elsewhere")
    (directory / SHARD).symlink_to(tmp_path / "elsewhere")
    assert newest_good(directory.parent).directory == directory
    load_state(directory, PLAN, 0)


def test_no_more_of_a_file_is_read_than_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"[1, 2]")
    assert read_bounded(path, 6) == b"[1, 2]"
    assert read_json(path, 6) == [1, 2]
    with pytest.raises(OSError, match="It has 6 bytes; expected 5 at most"):
        read_bounded(path, 5)
    with pytest.raises(OSError, match="It is a directory"):
        open_regular(tmp_path)
