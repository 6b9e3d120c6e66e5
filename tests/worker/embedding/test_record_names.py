"""An id that its table does not have is named by the record that has it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidJob
from tests.psrpc.rows import TABLES
from worker import Arrays, Csv, Function, Npz, Ragged
from worker.data.source import DataSource
from worker.embedding.record_names import name_in_batch, naming_record, not_finite_record
from worker.embedding.rows import Call, IdRule, find_rows

RECORDS, BAD, WHERE = 60, 999_999, 27
IDS = np.where(np.arange(RECORDS) == WHERE, BAD, np.arange(RECORDS))
LABELS = np.zeros(RECORDS, np.float32)
[TABLE] = [table for table in TABLES if table.vocabulary is not None]
SHUFFLED = [BatchId(epoch, first, 10) for epoch in (0, 1) for first in range(0, RECORDS, 10)]


def csv_of(folder: Path) -> DataSource:
    path = folder / "ids.csv"
    path.write_text("id,label\n" + "".join(f"{i},0\n" for i in IDS))
    return Csv(path, y="label", x_dtype="int64")


def npz_of(folder: Path) -> DataSource:
    np.savez(folder / "ids.npz", x=IDS, y=LABELS)
    return Npz(folder / "ids.npz", x="x", y="y")


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        ({}, {}, ""),
        ({27: np.nan}, {}, "x has a NaN in record 27"),
        ({}, {27: np.inf}, "y has an infinite value in record 27"),
        ({27: np.nan}, {27: np.nan}, "x has a NaN in record 27; y has a NaN in record 27"),
    ],
)
def test_data_that_is_not_finite_is_named_by_its_records(
    x: dict[int, float], y: dict[int, float], said: str
) -> None:
    features, labels = np.ones((RECORDS, 2), np.float32), np.ones(RECORDS, np.float32)
    for place, value in x.items():
        features[place, 1] = value
    for place, value in y.items():
        labels[place] = value
    source = Arrays(features, labels)
    found = [not_finite_record(source, 3, batch) for batch in SHUFFLED]
    assert found.count("") == len(found) - (2 if said else 0)
    assert set(found) == {"", said}


def test_of_many_records_that_are_not_finite_the_first_are_named() -> None:
    bad = np.full(RECORDS, np.nan, np.float32)
    values = Ragged(bad, np.arange(RECORDS + 1))
    said = not_finite_record(Arrays({"a": values, "id": IDS}, bad), 3, SHUFFLED[0])
    assert re.fullmatch(
        r"x\['a'\] has a NaN in (record \d+, ){2}record \d+ and 7 more; "
        r"y has a NaN in (record \d+, ){2}record \d+ and 7 more",
        said,
    )


def test_data_that_is_not_given_once_more_is_not_named() -> None:
    class Once:
        def read(self, _seed: int, _batch: BatchId) -> Any:
            raise RuntimeError

    assert not_finite_record(Once(), 3, SHUFFLED[0]) == ""  # type: ignore[arg-type]


def find(x: Any, ids: Any, count: int, name: Any) -> None:
    with naming_record(x, count, name):
        find_rows([TABLE], [Call(0, IdRule("rows"))], [np.asarray(ids, np.int64)], 2)


@pytest.mark.parametrize(
    ("source_of", "named"),
    [
        (lambda _: Arrays(IDS, LABELS), f"record {WHERE}: layer 'rows' was given id {BAD}"),
        (lambda _: Arrays({"id": IDS}, LABELS), f"record {WHERE}: layer "),
        (npz_of, f"record {WHERE}: layer 'rows' was given id {BAD}"),
        (csv_of, f"line {WHERE + 2} of '"),
        (
            lambda _: Function(lambda a, b: (IDS[a:b], LABELS[a:b]), RECORDS, block_records=16),
            f"record {WHERE}: layer",
        ),
    ],
)
def test_of_shuffled_records(source_of: Any, named: str, tmp_path: Path) -> None:
    source, seen = source_of(tmp_path), []
    for batch in SHUFFLED:
        x, *_ = source.read(3, batch)
        ids = x["id"] if isinstance(x, dict) else x
        try:
            find(x, ids, batch.count, name_in_batch(source, 3, batch))
        except InvalidJob as error:
            seen.append(str(error))
    source.close()
    assert len(seen) == 2, "one in each epoch"
    assert all(line.startswith(named) for line in seen)


def test_of_records_of_different_lengths(tmp_path: Path) -> None:
    rows = Ragged.from_rows([[1, 2], [], [3, BAD, 4], [5]])
    with pytest.raises(InvalidJob, match=r"^record 2: layer 'rows' was given id"):
        find(rows, rows.values, 4, lambda place: f"record {place}")


def test_a_record_that_is_not_known_is_not_named() -> None:
    """Of a source of the user's own, or of ids that the model has made of others."""
    own = object()
    batch = BatchId(0, 0, 3)
    for x, ids, name in [
        (np.array([1, BAD, 2]), [1, BAD, 2], name_in_batch(own, 0, batch)),  # type: ignore[arg-type]
        (np.array([1, 2, 3]), [4, 5, 6, BAD], "record {}".format),
        (np.array([1, 2, 3]), BAD, "record {}".format),
    ]:
        with pytest.raises(InvalidJob, match=r"^layer 'rows' was given id 999999, which table"):
            find(x, ids, 3, name)
