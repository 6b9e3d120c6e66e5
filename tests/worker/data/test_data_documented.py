"""docs/data.md has every data source, as it is called."""

from __future__ import annotations

import inspect
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import pserver
from tests.test_architecture import ROOT
from worker import Arrays, Csv, Function, Npz, Parquet, TfRecords

PAGE = (ROOT / "docs" / "data.md").read_text()
SOURCES: list[type[Any]] = [Arrays, Npz, Csv, Parquet, TfRecords, Function]


def as_called(source: type[Any]) -> str:
    """Its constructor, without types."""
    signature = inspect.signature(source)
    empty = inspect.Parameter.empty
    names = [each.replace(annotation=empty) for each in signature.parameters.values()]
    return source.__name__ + str(inspect.Signature(names))


def test_the_table_has_the_signature_of_each_source() -> None:
    table = re.findall(r"^\| [^|]+ \| `(\w+\(.*\))` \|$", PAGE, flags=re.MULTILINE)
    assert table == [as_called(source) for source in SOURCES]


def test_no_source_is_left_out() -> None:
    parts = ("num_records", "read", "read_range", "fingerprint", "close")
    exported = [getattr(pserver, name) for name in pserver.__all__ if name != "DataSource"]
    found = {each for each in exported if all(hasattr(each, part) for part in parts)}
    assert found == set(SOURCES)


def test_the_readme_points_to_the_table() -> None:
    assert "(docs/data.md)" in (ROOT / "README.md").read_text()


def test_the_example_reads_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flats.csv").write_text("size,city,rent\n50,Bern,1.5\n80,Basel,2.25\n")
    [code, parquet] = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    with closing(names["train"]) as train:
        x, y = train.read_range(0, 2)
    assert x["city"].tolist() == [1, 0]
    assert x["size"].tolist() == [50, 80]
    assert (y.tolist(), str(y.dtype)) == ([1.5, 2.25], "float32")
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"size": [1.5, 2], "floor": [0, 1], "tags": [[1], [2, 3]], "rent": [4.0, 5.0]}
    pq.write_table(pa.table(columns), "flats.parquet")
    exec(parquet, names)
    with closing(names["train"]) as train:
        x, y = train.read_range(0, 2)
    assert x["numbers"].tolist() == [[1.5, 0], [2, 1]]
    assert x["tags"].values.tolist() == [1, 2, 3]
    assert y.tolist() == [4, 5]
