"""Arrays whose rows have different lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidJob
from worker import Arrays, Batch, Npz, Ragged
from worker.data.ragged import in_numpy, joined

LISTS = [[5, 6], [], [7, 8, 9], [1]]


def lists(ragged: Any) -> list[list[Any]]:
    assert isinstance(ragged, Ragged)
    return [ragged[row : row + 1].values.tolist() for row in range(len(ragged))]


def test_rows_are_taken_cut_and_joined() -> None:
    rows = Ragged.from_rows(LISTS)
    assert rows.shape == (4, None)
    assert rows.ndim == 2
    assert lists(rows) == LISTS
    assert lists(rows[1:3]) == LISTS[1:3]
    assert lists(rows[2:2]) == []
    assert lists(rows.take(np.array([3, 1, 1, 0]))) == [[1], [], [], [5, 6]]
    assert lists(rows.take(np.array([1]))) == [[]]
    assert lists(joined([rows[2:], rows[:2], rows[:0]])) == LISTS[2:] + LISTS[:2]


def test_rows_of_vectors() -> None:
    vectors = Ragged(np.arange(6.0).reshape(3, 2), np.array([0, 2, 3]))
    assert vectors.shape == (2, None, 2)
    assert lists(vectors.take(np.array([1, 0]))) == [[[4, 5]], [[0, 1], [2, 3]]]


def test_empty_lists_do_not_make_floats_of_ids() -> None:
    assert Ragged.from_rows([[], [1]]).dtype == np.int64
    assert Ragged.from_rows([[], []]).dtype == np.int64
    assert Ragged.from_rows([[]], "str").dtype.kind == "U"


@pytest.mark.parametrize(
    ("splits", "why"),
    [
        ([0, 2], "ascend from 0 to 3, the number of values; they are 0 to 2"),
        ([1, 3], "ascend from 0 to 3"),
        ([0, 2, 1, 3], "ascend from 0 to 3"),
        ([], "expected integers"),
        ([0.0, 3.0], "row_splits are float64"),
        ([[0, 3]], "of shape"),
    ],
)
def test_splits_that_do_not_cut_the_values_are_refused(splits: Any, why: str) -> None:
    with pytest.raises(InvalidJob, match=why):
        Ragged(np.arange(3), np.array(splits))


def columns(rows: Any) -> Arrays:
    return Arrays({"ids": rows, "one": np.arange(4)}, np.arange(4))


@pytest.mark.parametrize("as_pandas", [False, True])
def test_arrays_shuffle_ragged_rows_with_the_others(as_pandas: bool) -> None:
    source = columns(np.array(LISTS, object) if as_pandas else Ragged.from_rows(LISTS))
    x, y = source.read(3, BatchId(2, 1, 3))
    assert lists(x["ids"]) == [LISTS[row] for row in y]
    assert lists(source.read_range(1, 3)[0]["ids"]) == LISTS[1:3]


def test_a_map_may_make_rows_ragged() -> None:
    def split(x: Any, y: Any) -> Batch:
        return Ragged.from_rows(line.split("|") for line in x), y

    x, _ = Arrays(np.array(["a|b", "c", "d|e|f"]), np.zeros(3), map=split).read_range(1, 3)
    assert lists(x) == [["c"], ["d", "e", "f"]]
    short = Arrays(np.array(["a", "b"]), np.zeros(2), map=lambda x, y: (split(x[1:], y)[0], y))
    with pytest.raises(InvalidJob, match="map gave 1 record; it was asked for 2"):
        short.read_range(0, 2)


def test_fingerprints_tell_values_and_lengths_apart() -> None:
    rows = Ragged.from_rows(LISTS)
    same = columns(Ragged.from_rows(LISTS)).fingerprint()
    assert columns(rows).fingerprint() == same
    assert columns(Ragged(rows.values, np.array([0, 1, 2, 5, 6]))).fingerprint() != same
    assert columns(Ragged(rows.values + 1, rows.row_splits)).fingerprint() != same


def test_two_arrays_of_a_file_are_a_ragged_one(tmp_path: Path) -> None:
    path, rows = tmp_path / "data.npz", Ragged.from_rows(LISTS)
    np.savez(path, values=rows.values, splits=rows.row_splits, y=np.arange(4))
    keys = ("values", "splits")
    whole = Npz(path, x=keys)
    assert lists(whole.read_range(0, 4)[0]) == LISTS
    part = Npz(path, x={"ids": keys}, records=(1, 4))
    assert lists(part.read_range(0, 3)[0]["ids"]) == LISTS[1:]
    assert part.fingerprint() != whole.fingerprint()
    with pytest.raises(InvalidJob, match="has no array 'lengths'"):
        _ = Npz(path, x=("values", "lengths")).num_records


@pytest.mark.slow
def test_tensors_that_would_lose_something_are_refused() -> None:
    import tensorflow as tf

    nested = tf.ragged.constant([[[1], [2, 3]], [[4]]])
    with pytest.raises(InvalidJob, match="one dimension that differs"):
        in_numpy(nested)
    gaps = tf.SparseTensor([[0, 0], [1, 1]], [1, 2], [2, 2])
    with pytest.raises(InvalidJob, match="rows with gaps"):
        in_numpy(gaps)
    with pytest.raises(InvalidJob, match="sparse tensor has shape"):
        in_numpy(tf.sparse.from_dense([1, 0]))
    assert lists(in_numpy(tf.sparse.from_dense([[1, 2], [0, 0]]))) == [[1, 2], []]
