"""CSV files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidJob
from worker import Csv as _Csv
from worker.data import csv as data_csv

_opened: list[_Csv] = []


def Csv(path: Path, **options: Any) -> _Csv:  # noqa: N802  # reads like the class
    """A source that is closed when the test ends."""
    _opened.append(_Csv(path, **options))
    return _opened[-1]


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "data.csv"
    path.write_bytes(text.encode())
    return path


def test_columns_by_name_in_any_order(tmp_path: Path) -> None:
    path = write(tmp_path, "a,label,b\n1,7,0.5\n2,8,-1e3\n")
    data = Csv(path, y="label", x=["b", "a"])
    x, y = data.read_range(0, 2)
    assert x.tolist() == [[0.5, 1.0], [-1000.0, 2.0]]
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    assert y.tolist() == [7, 8]


def test_all_but_the_label_without_a_header(tmp_path: Path) -> None:
    data = Csv(write(tmp_path, "1;2;3\n4;5;6"), y=2, header=False, delimiter=";")
    x, y = data.read_range(0, 2)
    assert x.tolist() == [[1, 2], [4, 5]]
    assert y.tolist() == [3, 6]


@pytest.mark.parametrize("scan_nbytes", [1, 2, 7, 1 << 24])
def test_line_ends_of_all_kinds_wherever_the_scan_is_cut(
    tmp_path: Path, scan_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_csv, "_SCAN_NBYTES", scan_nbytes)
    path = write(tmp_path, '\ufeffa,y\r\n1,2\r\n\r\n3,4\n\n"5",6')
    data = Csv(path, y="y", x=["a"])
    assert data.num_records == 3
    x, y = data.read_range(0, 3)
    assert x[:, 0].tolist() == [1, 3, 5]
    assert y.tolist() == [2, 4, 6]


def test_an_epoch_holds_every_record_once(tmp_path: Path) -> None:
    data = Csv(write(tmp_path, "a,y\n" + "".join(f"{i},{i}\n" for i in range(50))), y="y")
    labels = [y for i in range(5) for y in data.read(0, BatchId(1, i * 10, 10))[1].tolist()]
    assert sorted(labels) == list(range(50))
    assert labels != list(range(50))
    data.close()
    assert data.read(0, BatchId(1, 0, 10))[1].tolist() == labels[:10]


def test_text_goes_to_the_map(tmp_path: Path) -> None:
    path = write(tmp_path, 'word,y\n"a, b",1\nc,0\n')

    def lengths(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.char.str_len(x), y

    x, _ = Csv(path, y="y", x_dtype="str", map=lengths).read_range(0, 2)
    assert x.tolist() == [[4], [1]]


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("a,y\n1,2\n", {"y": "z"}, "has no column 'z'; it has a, y"),
        ("0.5,-2e3\n1,2\n", {"y": "y"}, "has no column 'y'; it has 0.5, -2e3; that is a line of "),
        ("1,2\n", {"y": 2, "header": False}, "has no column 2; it has 0 to 1"),
        ("a,y\n1,2\n1,2,3\n", {"y": "y"}, "line 3 has 3 columns; expected 2"),
        (
            "a,y\n\nx,2\n",
            {"y": "y"},
            "line 3 column 'a' is 'x'; expected float32; for text say x_dtype=",
        ),
        ("a,y\n1,cat\n", {"y": "y"}, "is 'cat'; expected int64; for text say y_dtype='str', and"),
        (
            "a,y\n1,2.5\n",
            {"y": "y"},
            "is '2.5'; expected int64; for numbers with a fraction say y_dtype='float32'",
        ),
        (
            "a,y\n1,2.5\n",
            {"y": "a", "x_dtype": "int8"},
            "line 2 column 'y' is '2.5'; expected int8; for numbers with a fraction say x_dtype=",
        ),
        ("a,y\n1,\n", {"y": "y"}, "line 2 column 'y' is ''; expected int64; the field is empty"),
        (
            "a,y\n1,2\n,3\n",
            {"y": "y"},
            "line 3 column 'a' is ''; expected float32; the field is empty: fill it, leave the "
            "line out, or give it a value in map=: with x_dtype='str', "
            "x = np.where(x == '', '0', x).astype('float32')",
        ),
        ("a;b;y\n1;2;3\n", {"y": "y"}, "has no column 'y'; it has a;b;y; its columns seem to b"),
        ("a;b;y\n1;2;3\n", {"y": "label"}, "say delimiter=';'"),
        ("a\tb\ty\n1\t2\t3\n", {"y": "y"}, r"say delimiter='\t'"),
        ("a,y\n1,3\n", {"y": "y", "delimiter": ";"}, "say delimiter=','"),
        ("1;2;3\n", {"y": 2, "header": False}, "has no column 2; it has 0 to 0; its columns seem "),
    ],
)
def test_errors_are_named_by_line_and_column(
    tmp_path: Path, text: str, options: dict[str, Any], says: str
) -> None:
    data = Csv(write(tmp_path, text), **options)
    with pytest.raises(InvalidJob) as raised:
        data.read_range(0, data.num_records)
    assert says in str(raised.value)


def test_a_delimiter_is_named_only_where_it_does_better(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=r"has no column 'z'; it has a;b, y$"):
        _ = Csv(write(tmp_path, "a;b,y\n1,2\n"), y="z").num_records
    with pytest.raises(InvalidJob, match=r"has no column 'z'; it has a$"):
        _ = Csv(write(tmp_path, "a\n1\n"), y="z").num_records


def test_a_gap_is_filled_as_the_hint_says(tmp_path: Path) -> None:
    path = write(tmp_path, "a,y\n1,2\n,3\n")
    with pytest.raises(InvalidJob) as raised:
        Csv(path, y="y").read_range(0, 2)
    hint = str(raised.value).partition("with x_dtype='str', x = ")[2]

    def filled(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return eval(hint, {"np": np, "x": x}), y

    x, _ = Csv(path, y="y", x_dtype="str", map=filled).read_range(0, 2)
    assert x.tolist() == [[1.0], [0.0]]


def test_no_records_and_no_file(tmp_path: Path) -> None:
    assert Csv(write(tmp_path, "a,y\n"), y="y").num_records == 0
    with pytest.raises(InvalidJob, match="no file"):
        _ = Csv(tmp_path / "absent.csv", y="y").num_records
    with pytest.raises(InvalidJob, match="no column 'y'"):
        _ = Csv(write(tmp_path, ""), y="y").num_records


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes("a,y\ncafé,1\n".encode("latin-1"))
    with pytest.raises(InvalidJob, match="line 2 is not UTF-8"):
        Csv(path, y="y", x_dtype="str").read_range(0, 1)


def test_a_fingerprint_is_of_all_that_decides_what_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b,label\n1,2,3\n")
    plain: dict[str, Any] = {"y": "label", "x": ["a", "b"]}
    changes: list[dict[str, Any]] = [
        {},
        {"x": ["b", "a"]},
        {"x": None},
        {"y": "b"},
        {"header": False},
        {"delimiter": ";"},
        {"x_dtype": "float64"},
        {"y_dtype": "int32"},
    ]
    found = [Csv(path, **plain | change).fingerprint() for change in changes]
    assert len(set(found)) == len(changes)
    assert Csv(path, **plain).fingerprint() == found[0]
    path.write_text("a,b,label\n1,2,4\n")
    assert Csv(path, **plain).fingerprint() not in found
