"""The file of one table: what is written is mapped, and another file is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from psrpc.checkpoint.table_file import TableValues, map_table_file, write_table_file
from psrpc.core.errors import CheckpointError
from tests.psrpc.rows import TABLES

SPEC = TABLES[0]


def write(path: Path, rows: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.arange(rows, dtype=np.int64) * 7 - 3
    values = np.random.default_rng(rows).normal(size=(rows, SPEC.width)).astype(np.float32)

    def fill(into: TableValues) -> None:
        into[...] = values

    write_table_file(path, SPEC, {"run_id": "a"}, ids, fill)
    return ids, values


@pytest.mark.parametrize("rows", [0, 1, 1000])
def test_rows_come_back_in_their_order(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "new" / "table.safetensors"
    ids, values = write(path, rows)
    spec, found, mapped = map_table_file(path)
    assert spec == SPEC
    np.testing.assert_array_equal(found, ids)
    np.testing.assert_array_equal(mapped, values)
    assert mapped.shape == (rows, SPEC.width)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        map_table_file(path)
    write(path, 5)
    whole = path.read_bytes()
    for part in (b"", whole[:7], whole[:-1], whole.replace(b"rows", b"owls")):
        path.write_bytes(part)
        with pytest.raises(CheckpointError, match="is not a file of a table"):
            map_table_file(path)


def test_a_failed_write_leaves_the_file_of_before(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    write(path, 5)
    before = path.read_bytes()

    def fill(_into: TableValues) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        write_table_file(path, SPEC, {}, np.arange(3), fill)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
