"""The work of Spark's tasks for ``predictions``; tests/launchers runs it under Spark."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from psrpc.core.errors import InvalidArgument, InvalidData, LaunchFailed, PsError
from worker.data.columns import ColumnReader, Columns
from worker.predict import frames
from worker.predict.frames import _Predictor, predictions

pa = pytest.importorskip("pyarrow")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

COLUMNS = {"a": [1.0, 2.0, 3.0], "b": [10, 20, 30], "pair": [[1, 2], [3, 4], [5, 6]], "c": "xyz"}


def model(units: int) -> keras.Model:
    """Gives ``[n, units]``, the sum of a row in each column."""
    layer = keras.layers.Dense(units, kernel_initializer="ones")
    return keras.Sequential([keras.Input((2,)), layer])


def predicted(
    given: Path | Callable[[], Any],
    x: Columns = ("a", "b"),
    returns: str = "float",
    map: Any = None,
    columns: Any = COLUMNS,
) -> list[Any]:
    """Predicts two batches of records in steps of two."""
    table = pa.table({name: list(values) for name, values in columns.items()})
    work = _Predictor(given, ColumnReader("predictions", "it"), x, None, map, "p", returns, 2)
    if isinstance(given, Path):
        work = pickle.loads(pickle.dumps(work))
    found = pa.Table.from_batches(work(iter(table.to_batches() * 2)))
    assert found.column_names == [*columns, "p"]
    return list(found["p"].to_pylist())


def test_a_model_of_a_file_is_loaded_once_per_process_and_change(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    model(1).save(path)
    frames._of_file.cache_clear()
    assert predicted(path) == predicted(path) == [11, 22, 33] * 2
    assert frames._of_file.cache_info().misses == 1
    os.utime(path, ns=(1, 1))
    predicted(path)
    assert frames._of_file.cache_info().misses == 2
    with pytest.raises(LaunchFailed, match=r"does not see '.*no'; the model") as unseen:
        predicted(tmp_path / "no")
    assert unseen.value.code == "PS141"


def test_arrays_dicts_and_a_map() -> None:
    assert predicted(lambda: model(2), "pair", "array<double>") == [[3, 3], [7, 7], [11, 11]] * 2
    named = keras.Input((2,), name="in")
    by_name = keras.Model({"in": named}, keras.layers.Flatten()(named))
    assert predicted(lambda: by_name, {"in": "pair"}, "array<float>")[:2] == [[1, 2], [3, 4]]
    assert predicted(lambda: model(1), map=lambda x: 2 * x) == [22, 44, 66] * 2


@pytest.mark.parametrize(
    ("units", "x", "returns", "columns", "says"),
    [
        (2, ["a", "b"], "float", COLUMNS, r"gives \[3, 2\] for 3 records, .* no float; say return"),
        (1, ["a", "no"], "float", COLUMNS, "it has no column 'no'"),
        (
            1,
            ["a", "b"],
            "float",
            {"a": [1.5, None], "b": [1, 2]},
            "row 1 has no value in column 'a'",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    units: int, x: Sequence[str], returns: str, columns: Any, says: str
) -> None:
    with pytest.raises(PsError, match=says):
        predicted(lambda: model(units), x, returns, columns=columns)


def test_a_model_of_several_outputs_is_refused() -> None:
    given = keras.Input((2,))
    both = keras.Model(given, [given, given])
    with pytest.raises(InvalidData, match="the model has 2 outputs; make a model of one"):
        predicted(lambda: both)


class Frame:
    columns = ("a", "b")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"x": "a", "returns": "int"}, "returns is 'int'; expected array<float> or"),
        ({"x": "a", "output": "b"}, "the frame has a column 'b' already"),
        ({"x": "a", "batch_size": 0}, "batch_size is 0"),
        ({"x": {"in": ["a", "bb"]}}, "the frame has no column 'bb'; did you mean 'b'?"),
    ],
)
def test_a_wrong_call_is_refused_at_once(options: dict[str, Any], says: str) -> None:
    pytest.importorskip("pyspark")
    with pytest.raises((InvalidArgument, InvalidData), match=says.replace("?", r"\?")):
        predictions(Frame(), lambda: None, **options)


def test_numbers_of_any_precision_become_columns() -> None:
    values = np.ones((3, 1), np.float16)
    column = _Predictor(Path(), ColumnReader("", ""), "a", None, None, "p", "double", 1)._column
    assert column(values, 3).to_pylist() == [1, 1, 1]
