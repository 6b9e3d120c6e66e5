"""The data arguments of ``fit``: what Keras makes of them, and what workers cannot read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import structlog
import tensorflow as tf
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_slicing import train_validation_split

from psrpc.core.errors import InvalidData, InvalidSetting
from worker import Arrays
from worker.data.ragged import Ragged, in_numpy
from worker.data.source import arrays_of, map_arrays
from worker.stored.arguments import FitData, prediction_data, training_data
from worker.stored.stored_data import open_stored, store

pytestmark = pytest.mark.slow

X = np.arange(20.0).reshape(10, 2)
Y = np.arange(10) % 3


class Squares(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    """Batches of 4, 4 and 2 records."""

    sizes = (4, 4, 2)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        first = sum(self.sizes[:index])
        x = np.arange(first, first + self.sizes[index])
        return x, x**2


def stored(folder: Path, data: FitData) -> Any:
    """The records of a pass, after a way through the files."""
    description = store(folder, data, say=lambda _: None)
    return open_stored(folder, description).read_range(0, description["records"])


def same(one: Any, other: Any) -> None:
    one, other = map_arrays(in_numpy, one), map_arrays(in_numpy, other)
    assert type(one) is type(other)
    left, right = list(arrays_of(one)), list(arrays_of(other))
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if isinstance(a, Ragged):
            np.testing.assert_array_equal(a.row_splits, b.row_splits)
            a, b = a.values, b.values
        np.testing.assert_array_equal(a, b)


FRAME = pd.DataFrame({"a": np.arange(10.0), "b": np.arange(10)})
TEXTS = np.array(["", "a", "ümläut", "x" * 5000, "tail\0\0", *"fghij"], object)

FORMS: dict[str, tuple[Any, Any, Any]] = {
    "float64": (X, Y, None),
    "float16": (X.astype(np.float16), Y, None),
    "whole numbers": (X.astype(np.uint8), Y.astype(bool), None),
    "not contiguous": (np.asfortranarray(X), X[::-1, 1], None),
    "several": ({"b": X, "a": (X, Y)}, (Y, X), None),
    "weights": (X, Y, np.linspace(0, 1, 10)),
    "weights of all outputs": (X, {"one": Y, "two": X}, np.linspace(0, 1, 10)),
    "weights of each output": (X, {"one": Y, "two": X}, {"two": X, "one": np.ones((10, 1))}),
    "frame": (FRAME, FRAME["b"], FRAME["a"]),
    "columns": (dict(FRAME), FRAME["b"], None),
    "tensors": (tf.constant(X), tf.constant(Y), None),
    "bfloat16": (tf.cast(X, tf.bfloat16), Y, None),
    "variable": (keras.Variable(X), Y, None),
    "ragged": (tf.ragged.constant([[1.5] * n for n in range(10)]), Y, None),
    "ragged rows": (tf.RaggedTensor.from_row_lengths(X[:9], [0, 5, *[0] * 6, 4, 0]), Y, None),
    "strings": (TEXTS, Y, None),
    "string tensor": (tf.constant(TEXTS), Y, None),
    "columns of strings": (tf.constant([["a", "bc"]] * 10), Y, None),
    "no label": (X, None, None),
}


@pytest.mark.parametrize("form", FORMS)
def test_workers_read_what_keras_reads(tmp_path: Path, form: str) -> None:
    x, y, weights = FORMS[form]
    adapter = get_data_adapter(x, y, sample_weight=weights, batch_size=10)
    batch = next(iter(adapter.get_tf_dataset()))
    training, _ = training_data(x, y, sample_weight=weights, shuffle=False)
    same(stored(tmp_path / "data", training), (batch, ()) if y is None else batch)


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.3, 0.5, 0.99])
def test_the_last_part_is_split_off_as_keras_does(tmp_path: Path, fraction: float) -> None:
    x, y = np.arange(101), -np.arange(101)
    (own, _, _), theirs = train_validation_split((x, y, None), fraction)
    training, validation = training_data(x, y, validation_split=fraction)
    assert validation is not None
    assert training.records == len(own)
    assert (training.order, validation.order) == ("shuffled", "kept")
    same(stored(tmp_path / "data", validation), theirs[:2])


def test_weights_and_ragged_rows_are_split_too(tmp_path: Path) -> None:
    rows = tf.ragged.constant([[i] * i for i in range(10)])
    _, validation = training_data(rows, Y, sample_weight=X[:, 0], validation_split=0.2)
    assert validation is not None
    x, y, weights = stored(tmp_path / "data", validation)
    np.testing.assert_array_equal(x.values, [8] * 8 + [9] * 9)
    np.testing.assert_array_equal(y, Y[8:])
    np.testing.assert_array_equal(weights, [16, 18])


def test_validation_data_comes_first_and_the_split_is_ignored() -> None:
    training, validation = training_data(
        X, Y, validation_split=0.5, validation_data=(X[:3], Y[:3], Y[:3])
    )
    assert training.records == 10
    assert validation is not None
    assert validation.records == 3
    assert validation.weights is not None


@pytest.mark.parametrize(
    ("arguments", "sizes", "of_validation"),
    [
        ({}, (10, 10, 1, 32), (5, 5, 1, 32)),
        ({"batch_size": 4}, (10, 10, 3, 4), (5, 5, 2, 4)),
        ({"batch_size": 4, "validation_batch_size": 2}, (10, 10, 3, 4), (5, 5, 3, 2)),
        ({"batch_size": 4, "steps_per_epoch": 2}, (10, 8, 2, 4), (5, 5, 2, 4)),
        ({"batch_size": 4, "steps_per_epoch": 3}, (10, 10, 3, 4), (5, 5, 2, 4)),
        ({"steps_per_epoch": 4}, (10, 10, 4, 3), (5, 5, 1, 32)),
        ({"validation_steps": 2}, (10, 10, 1, 32), (5, 5, 2, 3)),
        (
            {"validation_steps": 1, "validation_batch_size": 2},
            (10, 10, 1, 32),
            (5, 2, 1, 2),
        ),
    ],
    ids=str,
)
def test_sizes_are_those_of_keras(
    arguments: dict[str, Any], sizes: tuple[int, ...], of_validation: tuple[int, ...]
) -> None:
    training, validation = training_data(X, Y, validation_data=(X[:5], Y[:5]), **arguments)
    assert validation is not None
    for data, expected in ((training, sizes), (validation, of_validation)):
        found = data.sizes()
        assert (found.pass_records, found.records, found.steps, found.batch_size) == expected


def test_more_steps_than_batches_end_with_the_data_and_a_warning() -> None:
    training, _ = training_data(X, Y, batch_size=4, steps_per_epoch=5)
    with structlog.testing.capture_logs() as logs:
        assert training.sizes().steps == 3
    assert [each["event"] for each in logs] == [
        "an epoch has 3 steps, not 5: the data has 10 records, 4 in a batch"
    ]


@pytest.mark.parametrize(
    ("x", "shuffle", "order"),
    [
        (X, True, "shuffled"),
        (X, False, "kept"),
        (X, "batch", "within_batches"),
        (Squares(), True, "batches"),
        (Squares(), False, "kept"),
        (tf.data.Dataset.from_tensors(X), True, "kept"),
        (Arrays(X, Y), True, "shuffled"),
        (Arrays(X, Y), False, "kept"),
    ],
)
def test_shuffle_means_what_it_means_to_keras(x: Any, shuffle: bool | str, order: str) -> None:
    assert training_data(x, shuffle=shuffle)[0].order == order


def test_a_py_dataset_has_its_own_batch_size() -> None:
    data, _ = training_data(Squares(), batch_size=32)
    assert (data.batch_size, data.records) == (4, 10)


def test_hooks_of_a_py_dataset_are_named_as_not_called() -> None:
    class Shuffling(Squares):
        def on_epoch_end(self) -> None: ...

    with structlog.testing.capture_logs() as logs:
        training_data(Shuffling())
    assert [each["event"] for each in logs] == [
        "on_epoch_end of Shuffling is not called: workers read its batches at any time; with "
        "shuffle=True their order changes each epoch"
    ]


def test_class_weight_goes_to_the_job() -> None:
    assert training_data(X, Y, class_weight={0: 2.0})[0].class_weight == {0: 2.0}


def test_prediction_keeps_the_order_and_needs_no_labels() -> None:
    data = prediction_data(X, batch_size=4, steps=2)
    assert (data.order, data.sizes().records) == ("kept", 8)
    assert data.y == ()


class Endless(Squares):
    num_batches = None


def of_sizes(*sizes: int) -> Squares:
    dataset = Squares()
    dataset.sizes = sizes  # type: ignore[assignment]
    return dataset


def generator() -> Iterator[tuple[Any, Any]]:
    yield X, Y


DATASET = tf.data.Dataset.from_tensor_slices((X, Y))
FRAME_OF_ALL = pd.DataFrame({"a": ["x", "y"], "b": [1, 2]})

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"x": None}, "x is None; expected data"),
    "list": ({"x": [1, 2, 3]}, r"x\[0\] is 1 \(int\); expected an array.*np.array"),
    "lengths": (
        {"x": (X, X[:3]), "y": Y},
        r"different lengths: x\[0\] has 10 records, x\[1\] has 3 records, y has 10",
    ),
    "empty": ({"x": X[:0], "y": Y[:0]}, "x has 0 records; expected at least one"),
    "nothing": ({"x": {}}, "x and y have no array"),
    "scalar": ({"x": np.float32(3.0)}, r"x is a scalar, 3.0 \(float\); expected one row"),
    "key": ({"x": {1: X}}, r"x has the key 1 \(int\); expected names"),
    "objects": (
        {"x": np.array(["a", float("nan")], object)},
        r"x has dtype object, with nan \(float\) at \[1\].*fillna",
    ),
    "mixed frame": ({"x": FRAME_OF_ALL}, r"x has dtype object, with 1 \(int\) at \[0, 1\]"),
    "dates": ({"x": np.array(["2020-01-01"], "M8[D]")}, "x has dtype datetime64"),
    "sparse": ({"x": tf.sparse.from_dense(X)}, r"x is sparse .*tf.sparse.to_dense"),
    "symbolic": ({"x": keras.Input((3,))}, r"x is <KerasTensor.*expected an array"),
    "generator": ({"x": generator()}, r"x is a generator, .*pass a keras.utils.PyDataset"),
    "iterator": ({"x": iter([X])}, "x is a list_iterator, which one process alone"),
    "function": ({"x": generator}, r"x is <function generator.*, to be called; pass a"),
    "endless dataset": (
        {"x": DATASET.batch(4).repeat()},
        r"x is an endless tf.data.Dataset; end it with .take\(n\)",
    ),
    "empty dataset": ({"x": DATASET.take(0).batch(4)}, "x is a tf.data.Dataset of 0 batches"),
    "dataset and y": ({"x": DATASET.batch(4), "y": Y}, "y is given, and x is a _BatchDataset"),
    "dataset and weights": (
        {"x": DATASET.batch(4), "sample_weight": Y},
        "sample_weight is given, and x is a _BatchDataset.*leave sample_weight out",
    ),
    "dataset and split": (
        {"x": DATASET.batch(4), "validation_split": 0.2},
        "validation_split is 0.2, and x is a _BatchDataset; only arrays",
    ),
    "source and y": ({"x": Arrays(X, Y), "y": Y}, "y is given, and x is a Arrays"),
    "endless items": ({"x": Endless()}, "x is the PyDataset Endless without a number.*__len__"),
    "no items": ({"x": of_sizes()}, "x is the PyDataset Squares of 0 batches"),
    "larger last": ({"x": of_sizes(2, 3)}, r"Squares\[1\] has 3 records, and Squares\[0\] has 2"),
    "validation": (
        {"x": X, "y": Y, "validation_data": (X, Y[:3])},
        r"validation_data\[0\] has 10 records, validation_data\[1\] has 3",
    ),
    "validation parts": (
        {"x": X, "y": Y, "validation_data": (X, Y, Y, Y)},
        r"validation_data has 4 parts; expected x, \(x, y\)",
    ),
    "split": (
        {"x": X[:1], "y": Y[:1], "validation_split": 0.5},
        "0.5 of 1 record, which leaves 0 to train on and 1 to validate on",
    ),
    "class weights": (
        {"x": X, "y": Y, "sample_weight": Y, "class_weight": {0: 1.0}},
        "class_weight and sample_weight are given",
    ),
    "class weights of outputs": (
        {"x": X, "y": (Y, Y), "class_weight": {0: 1.0}},
        "class_weight is given, but y has several outputs",
    ),
    "weights of outputs": (
        {"x": X, "y": {"a": Y, "b": Y}, "sample_weight": {"a": Y}},
        "sample_weight and y have different parts",
    ),
    "weights of elements": (
        {"x": X, "y": {"a": Y, "b": Y}, "sample_weight": X},
        r"sample_weight has shape \[10, 2\] for several outputs",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_way_out(case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(InvalidData, match=message) as raised:
        training_data(**arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0 .*at least 1"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"steps_per_epoch": -1}, "steps_per_epoch is -1"),
        ({"validation_split": 1.0}, "validation_split is 1.0 .*from 0 to 1"),
        ({"shuffle": "batches"}, "shuffle is 'batches' .*True, False or 'batch'"),
        ({"class_weight": [1.0]}, "class_weight is .*expected a dict"),
    ],
)
def test_a_number_out_of_its_range_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        training_data(X, Y, **arguments)


def test_a_loader_of_torch_is_refused_by_name() -> None:
    """Without the package: only the names of its classes are looked at."""
    loader = type("DataLoader", (), {"__module__": "torch.utils.data.dataloader"})
    with pytest.raises(InvalidData, match="x is a torch DataLoader"):
        training_data(loader())
