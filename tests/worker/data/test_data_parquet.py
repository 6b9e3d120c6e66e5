"""Parquet files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidData, InvalidJob
from worker import Parquet as _Parquet
from worker import Ragged
from worker.data.row_groups import RowGroups
from worker.data.source import arrays_of

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

_opened: list[_Parquet] = []


def Parquet(path: Any, **options: Any) -> _Parquet:  # noqa: N802  # reads like the class
    """A source that is closed when the test ends."""
    _opened.append(_Parquet(path, **options))
    return _opened[-1]


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def write(path: Path, columns: Mapping[str, Any], rows: int = 2) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return path


def numbers(folder: Path, files: int = 3, each: int = 10, rows: int = 3) -> Path:
    """Writes files of ascending numbers as ``part-N.parquet`` and one without rows."""
    for part in range(files):
        values = np.arange(part * each, part * each + each)
        write(folder / f"part-{part}.parquet", {"a": values, "y": values}, rows)
    write(folder / "part-9.parquet", {"a": pa.array([], "int64"), "y": pa.array([], "int64")})
    (folder / "_SUCCESS").touch()
    return folder


@pytest.mark.parametrize("mix", [1, 4])
def test_an_epoch_holds_every_record_once_in_any_division(tmp_path: Path, mix: int) -> None:
    data = Parquet(numbers(tmp_path), y="y", mix=mix)
    assert data.num_records == 30
    whole = data.read(7, BatchId(1, 0, 30))[1].tolist()
    assert sorted(whole) == list(range(30))
    assert whole != data.read(7, BatchId(2, 0, 30))[1].tolist()
    data.close()
    parts = [data.read(7, BatchId(1, first, 6))[1] for first in (24, 0, 18, 6, 12)]
    joined = [parts[at] for at in (1, 3, 4, 2, 0)]
    assert np.concatenate(joined).tolist() == whole
    assert data.read_range(8, 23)[1].tolist() == list(range(8, 23))


def test_records_of_a_few_row_groups_are_shuffled_together(tmp_path: Path) -> None:
    """Of 10 groups of 10, with ``mix=2`` each 20 positions hold two groups, in one order."""
    write(tmp_path / "x", {"a": np.arange(100), "y": np.arange(100)}, 10)
    order = Parquet(tmp_path / "x", y="y", mix=2).read(0, BatchId(0, 0, 100))[1].reshape(5, 20)
    for window in order // 10:
        first, second = np.unique(window)
        assert np.count_nonzero(window == first) == np.count_nonzero(window == second) == 10
        assert window.tolist() not in ([first] * 10 + [second] * 10, [second] * 10 + [first] * 10)


def test_memory_holds_a_bounded_number_of_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    load = RowGroups._load

    def counted(self: RowGroups, group: int) -> Any:
        loaded.append(group)
        return load(self, group)

    monkeypatch.setattr(RowGroups, "_load", counted)
    write(tmp_path / "x", {"a": np.arange(100), "y": np.arange(100)}, 10)
    data = Parquet(tmp_path / "x", y="y", mix=2)
    for first in range(0, 100, 5):
        data.read(0, BatchId(0, first, 5))
    assert sorted(loaded) == list(range(10))
    assert len(data._opened()._cached) == 4
    data.read_range(0, 100)
    assert len(data._opened()._cached) == 4


COLUMNS = {
    "size": [1.5, 2.5, 3.5],
    "rooms": pa.array([1, 2, 3], "int8"),
    "city": ["Bern", "Basel", "Bern"],
    "kind": pa.array(["a", "b", "a"]).dictionary_encode(),
    "price": pa.array([1, 2, 3], "int64").cast(pa.decimal128(22, 2)),
    "pixels": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
    "fixed": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2)),
    "ids": [[7], [], [8, 9]],
    "new": [True, False, True],
    "half": pa.array(np.array([0.5, 1.5, 2.5], np.float16)),
}


def test_columns_of_all_types(tmp_path: Path) -> None:
    inputs = {name: name for name in COLUMNS if name != "price"} | {"both": ["rooms", "pixels"]}
    data = Parquet(
        write(tmp_path / "x", COLUMNS), x=inputs, y="price", sample_weight="size", ragged=["ids"]
    )
    x, y, weight = data.read_range(0, 3)
    found = {name: (str(each.dtype), each.shape[1:]) for name, each in x.items()}
    assert found == {
        "size": ("float32", ()),
        "rooms": ("int8", ()),
        "city": ("<U5", ()),
        "kind": ("<U1", ()),
        "pixels": ("float32", (2,)),
        "fixed": ("int32", (2,)),
        "ids": ("int64", (None,)),
        "new": ("bool", ()),
        "half": ("float32", ()),
        "both": ("float32", (3,)),
    }
    assert x["city"].tolist() == COLUMNS["city"]
    assert x["fixed"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert x["both"].tolist() == [[1, 1, 2], [2, 3, 4], [3, 5, 6]]
    assert isinstance(x["ids"], Ragged)
    assert (x["ids"].values.tolist(), x["ids"].row_splits.tolist()) == ([7, 8, 9], [0, 1, 1, 3])
    assert (y.tolist(), str(y.dtype)) == ([1, 2, 3], "float32")
    assert weight.tolist() == COLUMNS["size"]
    assert all(part.flags.c_contiguous for part in arrays_of(x) if not isinstance(part, Ragged))


def test_dtypes_and_a_map(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"a": ["x", "yy"], "b": [1, 2], "y": [1.0, 2.0]})
    data = Parquet(
        path, y="y", x_dtype="str", y_dtype="int64", map=lambda x, y: (np.char.str_len(x), y)
    )
    x, y = data.read_range(0, 2)
    assert x.tolist() == [[1, 1], [2, 1]]
    assert (y.tolist(), str(y.dtype)) == ([1, 2], "int64")


@pytest.mark.parametrize(
    ("columns", "options", "says"),
    [
        (
            {"label": [1], "b": [1]},
            {"y": "labels"},
            "has no column 'labels'; did you mean 'label'? ",
        ),
        ({"a": [1, 2, None], "y": [1, 2, 3]}, {"y": "y"}, "record 2 of '{}' has no value in colum"),
        ({"a": [[1], [2], [None]], "y": [1, 2, 3]}, {"y": "y"}, "record 2 of '{}' has no value"),
        (
            {"a": [{"b": 1}], "y": [1]},
            {"y": "y"},
            "struct<b: int64>; expected numbers, text, or li",
        ),
        ({"a": [b"x"], "y": [1]}, {"y": "y"}, "column 'a' of '{}' is binary; expected numbers, te"),
        (
            {"a": [{"type": 1, "size": 1, "indices": [0], "values": [1.0]}], "y": [1]},
            {"y": "y"},
            "pyspark.ml.functions.vector_to_array makes a list",
        ),
        (
            {"a": [[1], [2], [3, 4]], "y": [1, 2, 3]},
            {"y": "y"},
            "record 2 of '{}' has 2 values in column 'a'; expected 1, as in the first one; for "
            "lists of different lengths say ragged=['a']",
        ),
        ({"a": [[1]], "y": [1]}, {"y": "y", "ragged": ["b"]}, "ragged has 'b', which is no column"),
        ({"a": [1], "y": [1]}, {"y": "y", "ragged": ["a"]}, "ragged has 'a', which holds no lists"),
        ({"a": [[1]], "y": [1]}, {"y": "y", "ragged": ["a"]}, "ragged has 'a', which cannot be jo"),
        ({"a": ["b"], "y": [1]}, {"y": "y"}, "column 'a' of '{}' is text; expected float32"),
        (
            {"a": [1, 1, 1], "y": [1.0, 2.0, 2.5]},
            {"y": "y", "y_dtype": "int64"},
            "record 2 of '{}' has 2.5 in column 'y'; expected int64",
        ),
        ({"a": [1], "y": [300]}, {"y": "y", "y_dtype": "int8"}, "has 300 in column 'y'; expected"),
    ],
)
def test_errors_are_named_by_record_and_column(
    tmp_path: Path, columns: Mapping[str, Any], options: dict[str, Any], says: str
) -> None:
    path = write(tmp_path / "x", columns)
    data = Parquet(path, **options)
    with pytest.raises(InvalidJob) as raised:
        data.read_range(0, data.num_records)
    assert says.format(path) in str(raised.value)


def test_lists_have_the_length_of_the_first_record_whichever_is_read_first(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"a": [[1], [2], [3, 4], [5, 6]], "y": [1, 2, 3, 4]})
    with pytest.raises(InvalidData, match=r"record 2 .* has 2 values in column 'a'; expected 1"):
        Parquet(path, y="y").read_range(2, 4)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"Parquet: there is no file '.*absent'"):
        _ = Parquet(tmp_path / "absent", y="y").num_records
    with pytest.raises(InvalidData, match=r"there is no \*\.parquet in "):
        _ = Parquet(tmp_path, y="y").num_records
    (tmp_path / "text").write_text("a,y\n1,2\n")
    with pytest.raises(InvalidData, match=r"Parquet: '.*text' cannot be read: .* not a parquet f"):
        _ = Parquet(tmp_path / "text", y="y").num_records
    write(tmp_path / "a.parquet", {"a": [1], "y": [1]})
    write(tmp_path / "b.parquet", {"a": [1.0], "y": [1]})
    with pytest.raises(
        InvalidData, match=r"'a' of '.*b.parquet' is double, and of '.*a.parquet' i"
    ):
        _ = Parquet(tmp_path, y="y").num_records


def test_a_file_that_changes_under_a_running_job_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"a": np.arange(9), "y": np.arange(9)})
    data = Parquet(path, y="y")
    data.read_range(0, 2)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InvalidData, match=r"'.*x' was changed since it was opened"):
        data.read_range(2, 4)


def test_a_missing_pyarrow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x", {"a": [1], "y": [1]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InvalidJob, match=r"Parquet needs pyarrow, .*'tf-pserver\[parquet\]'") as no:
        _ = Parquet(path, y="y").num_records
    assert no.value.code == "PS135"


def test_a_fingerprint_is_of_all_that_decides_what_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"a": [1, 2], "b": [1, 2], "y": [1, 2]})
    plain: dict[str, Any] = {"y": "y", "x": ["a", "b"]}
    changes: list[dict[str, Any]] = [
        {},
        {"x": ["b", "a"]},
        {"x": None},
        {"y": "b"},
        {"sample_weight": "b"},
        {"ragged": ["a"]},
        {"x_dtype": "float64"},
        {"y_dtype": "int32"},
        {"mix": 2},
    ]
    found = [Parquet(path, **plain | change).fingerprint() for change in changes]
    assert len(set(found)) == len(changes)
    assert Parquet(str(path), **plain).fingerprint() == found[0]
    write(tmp_path / "x", {"a": [1, 3], "b": [1, 2], "y": [1, 2]})
    assert Parquet(path, **plain).fingerprint() not in found


def test_records_have_names(tmp_path: Path) -> None:
    data = Parquet(numbers(tmp_path), y="y")
    labels = data.read(3, BatchId(0, 0, 30))[1]
    for position in (0, 13, 29):
        file, record = divmod(int(labels[position]), 10)
        expected = f"record {record} of '{tmp_path}/part-{file}.parquet'"
        assert data.record_name(3, 0, position) == expected
