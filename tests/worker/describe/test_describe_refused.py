"""Jobs that ``worker describe`` refuses, and labels and weights that it takes."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from psrpc.core.errors import InvalidJob
from psrpc.options.job_keys import UserCodeFailed
from tests.worker.described_jobs import (
    Line,
    classes,
    dense,
    described,
    line_loss,
    one_hot,
    spoilt,
    text_labels,
)
from worker import Arrays

pytestmark = pytest.mark.slow
layers = keras.layers


def weights_only() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Flatten()])


def halved() -> keras.Model:
    norm = layers.BatchNormalization(name="n", dtype="float16", center=False, scale=False)
    return keras.Sequential([keras.Input((4,)), norm, layers.Dense(3)])


GENERALIZED = keras.losses.CategoricalGeneralizedCrossEntropy()


class Times(keras.metrics.Mean):  # type: ignore[misc]
    """Has an argument that is not in its config."""

    def __init__(self, factor: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.factor = factor


class Scaled(keras.losses.Loss):  # type: ignore[misc]
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"train": classes(0)}, "train holds no records"),
        ({"eval": classes(0)}, "eval holds no records"),
        (
            {"train": classes(9), "mode": "sync", "replicas": 2},
            "train holds 9 records, less than one global batch of 20",
        ),
        (
            {"mode": "sync", "replicas": 7},
            "train holds 60 records, less than one global batch of 70 (batch_size 10 x replicas 7)",
        ),
        ({"model": weights_only}, "the model has no trainable variables"),
        ({"model": halved}, "state variable 'sequential/n/moving_mean' has dtype float16"),
        (
            {"model": lambda: dense(dtype="float16")},
            "trainable variable 'sequential/dense/kernel' has dtype float16",
        ),
        ({"model": lambda: 3}, "model() made a int; expected a keras.Model or a tf.Module"),
        ({"train": classes(count=5)}, "train: record 3 has label 3; sparse_categorical_cross"),
        ({"train": spoilt(57, 3)}, "record 57 has label 3.0"),
        ({"train": spoilt(57, -1)}, "record 57 has label -1.0"),
        ({"train": spoilt(57, 0.5)}, "record 57 has label 0.5"),
        ({"eval": spoilt(59, 9)}, "eval: record 59 has label 9.0"),
        ({"train": one_hot()}, "labels of shape (3,) per example do not fit the loss sparse_"),
        ({"train": one_hot()}, "one-hot labels need categorical_crossentropy"),
        (
            {"loss": "categorical_crossentropy"},
            "labels of shape () per example do not fit the loss categorical_crossentropy and a "
            "model whose output has shape (3,); expected labels of shape (3,); integer class "
            "labels need sparse_categorical_crossentropy",
        ),
        (
            {"loss": GENERALIZED, "train": classes(column=True)},
            "labels of shape (1,) per example do not fit the loss categorical_generalized_cross_",
        ),
        ({"loss": GENERALIZED, "train": classes(count=4)}, "record 3 has label 3; categorical_gen"),
        ({"loss": "mse"}, "labels of shape () per example do not fit the loss mean_squared_error"),
        (
            {"loss": keras.losses.MeanSquaredError()},
            "labels of shape () per example do not fit the loss mean_squared_error",
        ),
        ({"train": text_labels("U")}, "train: labels are text, such as 'cat', and the loss takes "),
        ({"train": text_labels("S")}, "y = np.unique(labels, return_inverse=True)"),
        ({"train": text_labels("U"), "loss": "crossentropy"}, "labels are text, such as 'cat'"),
        (
            {"metrics": ["crossentropy"]},
            "Keras has no metric of that name; did you mean 'binary_crossentropy'?",
        ),
        ({"metrics": ["accuracy", None]}, "metrics contains None; leave it out"),
        (
            {"metrics": [keras.metrics.CosineSimilarity(axis=1)]},
            "'cosine_similarity' cannot be made anew from its config, which leaves out fn_kwargs; "
            "give a function without arguments that makes it, such as lambda: CosineSimilarity(...",
        ),
        ({"metrics": [Times(2, name="m")]}, "'m' cannot be made anew from its config, which leav"),
        (
            {"loss": "msse"},
            "loss is 'msse'; Keras has no loss of that name; did you mean 'mse'?",
        ),
        ({"loss": "accuracy"}, "no loss of that name; it is the name of a metric"),
        ({"loss": {"dense": "mse2"}}, "loss is 'mse2'; Keras has no loss of that name; did you "),
        (
            {"metrics": ["acuracy"]},
            "metrics contains 'acuracy'; Keras has no metric of that name; ",
        ),
        ({"metrics": ["acuracy"]}, "did you mean 'accuracy'?"),
        ({"metrics": {"dense": ["AUCC"]}}, "metrics contains 'AUCC'; Keras has no metric of that "),
        ({"metrics": ["rmse"]}, "did you mean 'root_mean_squared_error'?"),
        ({"metrics": ["qqq"]}, "no metric of that name; see keras.metrics for those that it has"),
        ({"metrics": ["mean_io_u"]}, "'num_classes'); give keras.metrics.MeanIoU(...) instead"),
        (
            {"metrics": [keras.metrics.MeanIoU]},
            "metrics contains the class MeanIoU, which needs arguments (num_classes); give "
            "MeanIoU(num_classes=...) instead",
        ),
        (
            {"optimizer": keras.optimizers.LossScaleOptimizer},
            "optimizer is the class LossScaleOptimizer, which needs arguments (inner_optimizer)",
        ),
        (
            {"loss": Scaled},
            "loss is the class Scaled, which needs arguments (by); give Scaled(by=...) instead",
        ),
        (
            {"model": Line, "metrics": [], "loss": keras.losses.MeanSquaredError},
            "but the model is a tf.Module; expected a function",
        ),
        ({"metrics": ["accuracy", "accuracy"]}, "two metrics are named 'accuracy'"),
        ({"optimizer": "sdg"}, "Keras has no optimizer of that name; did you mean 'sgd'?"),
        ({"optimizer": lambda: 3}, "optimizer() made a int; expected a Keras optimizer"),
        ({"init_from": "absent.keras"}, "init_from is 'absent.keras'; there is no such file"),
        (
            {"init_from": "/"},
            "init_from '/' is neither a checkpoint (it has no manifest.json) nor a",
        ),
        ({"model": Line, "metrics": []}, "but the model is a tf.Module; expected a function"),
        ({"model": Line, "loss": line_loss}, "metrics need a keras.Model"),
        (
            {"loss": lambda _y, p: tf.stop_gradient(tf.reduce_sum(p, -1))},
            "the loss depends on none of the trainable variables (sequential/dense/bias",
        ),
        (
            {"model": Line, "metrics": [], "loss": lambda m, x, _y: x @ m.layers[0]["w"]},
            "the loss has shape (10, 1); expected the mean, a scalar",
        ),
    ],
)
def test_a_job_that_cannot_be_trained_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidJob) as raised:
        described(**fields)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def twins() -> keras.Model:
    class Twins(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = [layers.Dense(3, name="twin"), layers.Dense(3, name="twin")]

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.parts[1](self.parts[0](x))

    return Twins()


def two_inputs(**dtypes: str) -> keras.Model:
    inputs = [keras.Input((4,), dtype=dtype, name=name) for name, dtype in dtypes.items()]
    numbers = [keras.ops.cast(i, "float32") if i.dtype != "string" else None for i in inputs]
    return keras.Model(inputs, layers.Dense(3)(next(n for n in numbers if n is not None)))


@pytest.mark.skipif(
    keras.__version__.startswith("3.12."), reason="Keras 3.12 refuses an input that leads nowhere"
)
@pytest.mark.parametrize(
    ("dtypes", "says"),
    [
        ({"x": "float32", "ids": "int64"}, "'ids' takes int64, and the data has text, [b'B00'];"),
        ({"x": "string", "ids": "int64"}, "takes string, and the data has float32; say keras.Inpu"),
    ],
)
@pytest.mark.parametrize("nest", [dict, list])
def test_data_of_another_kind_than_the_input_is_refused(
    dtypes: dict[str, str], says: str, nest: type
) -> None:
    arrays = {"x": np.ones((60, 4), np.float32), "ids": np.full((60, 4), b"B00", object)}
    x = arrays if nest is dict else list(arrays.values())
    with pytest.raises(InvalidJob) as raised:
        described(model=lambda: two_inputs(**dtypes), train=Arrays(x, np.arange(60) % 3))
    assert says in str(raised.value)


def test_evaluation_data_of_another_shape_is_refused_before_training() -> None:
    """It was found out at the end of the first epoch."""
    wrong = Arrays(np.zeros((20, 2, 2), np.float32), np.zeros(20, np.int64))
    with pytest.raises(InvalidJob, match=r"data of eval, .*x of the data has shape \[n, 2, 2\]"):
        described(eval=wrong)


def test_fractions_for_an_input_of_whole_numbers_are_refused() -> None:
    def fields(x: float) -> dict[str, Any]:
        data = Arrays(np.full((60, 4), x, np.float32), np.arange(60) % 3)
        return {"model": lambda: two_inputs(ids="int64"), "train": data}

    assert described(**fields(2.0))["train_records"] == 60
    for bad, shown in ((2.5, r"2\.5"), (np.nan, "nan"), (-np.inf, "-inf")):
        with pytest.raises(
            InvalidJob, match=rf"'ids' takes int64, and the data has float32, \[{shown}\]; "
        ):
            described(**fields(bad))


@pytest.mark.parametrize("kind", ["StringLookup", "IntegerLookup", "TextVectorization"])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_layer_without_its_vocabulary_is_refused(kind: str, deferred: bool) -> None:
    """TensorFlow says that a table is not initialized, and names neither layer nor cause."""
    texts = kind != "IntegerLookup"
    data = np.array(["a b", "b", "c"] if texts else [7, 8, 9])

    def model(given: Any = None, adapt: bool = False) -> keras.Model:
        layer = getattr(layers, kind)(vocabulary=given, name="words")
        if adapt:
            layer.adapt(data)
        shape, dtype = ((), "string") if kind == "TextVectorization" else ((1,), "int64")
        ids = keras.Input(shape, dtype="string" if texts else dtype)
        parts = [layers.Embedding(9, 4), layers.GlobalAveragePooling1D(), layers.Dense(3)]
        if deferred:
            return keras.Sequential([layer, *parts])
        return keras.Model(ids, keras.Sequential(parts)(layer(ids)))

    x = np.resize(data, 60) if kind == "TextVectorization" else np.resize(data, (60, 1))
    train = Arrays(x, np.arange(60) % 3)
    with pytest.raises(InvalidJob) as raised:
        described(model=model, train=train)
    assert str(raised.value) == (
        f"layer 'words' ({kind}) has no vocabulary; give it vocabulary=[...], or call its "
        "adapt(...) in the model function, with the same data in each process"
    )
    for told in ({"given": ["a", "b"] if texts else [7, 8]}, {"adapt": True}):
        assert described(model=partial(model, **told), train=train)["train_records"] == 60


def test_two_layers_of_one_name_are_told_apart() -> None:
    found = [variable["name"] for variable in described(model=twins)["variables"]]
    assert found[::2] == ["twins/twin/kernel", "twins/twin/kernel#2"]


@pytest.mark.parametrize(
    "fields",
    [
        {"train": spoilt(57, 1.0)},
        {"loss": "categorical_crossentropy", "train": one_hot()},
        {"loss": "crossentropy"},
        {"loss": "mse", "model": lambda: dense(1), "metrics": []},
        {"loss": lambda y, p: tf.square(tf.cast(y, tf.float32) - p[:, 0])},
        {
            "loss": keras.losses.SparseCategoricalCrossentropy(ignore_class=-1),
            "train": spoilt(57, -1),
        },
        {"loss": keras.losses.Circle(), "metrics": []},
        {"loss": keras.losses.CategoricalCrossentropy, "train": one_hot()},
        {"optimizer": keras.optimizers.Adam},
        {"loss": GENERALIZED, "model": lambda: dense(activation="softmax")},
        {"loss": "poisson", "model": lambda: dense(1), "metrics": [keras.metrics.MeanSquaredError]},
        {
            "metrics": [
                keras.metrics.SparseTopKCategoricalAccuracy(k=2),
                "sparse_categorical_accuracy",
            ]
        },
    ],
)
def test_labels_that_fit(fields: dict[str, Any]) -> None:
    assert described(**fields)["train_records"] == 60


def test_weights_and_several_inputs() -> None:
    def model() -> keras.Model:
        a, b = keras.Input((2,), name="a"), keras.Input((3,), name="b")
        return keras.Model({"a": a, "b": b}, layers.Dense(3)(layers.Concatenate()([a, b])))

    x = {"a": np.ones((60, 2), np.float32), "b": np.ones((60, 3), np.float32)}
    document = described(model=model, train=Arrays(x, np.arange(60) % 3, np.ones(60)))
    assert document["variables"][0]["shape"] == [5, 3]


def pixels(*shape: int) -> dict[str, Any]:
    """A job of images and weights of this shape."""
    x = np.ones((60, 6, 6, 1), np.float32)
    return {
        "model": lambda: keras.Sequential(
            [keras.Input((6, 6, 1)), layers.Conv2D(1, 3, padding="same", activation="sigmoid")]
        ),
        "loss": "binary_crossentropy",
        "metrics": [],
        "train": Arrays(x, x, np.ones(shape, np.float32)),
        # As many as the rows of an image: NumPy would spread the weights over those.
        "batch_size": 6,
    }


def test_weights_that_the_loss_cannot_be_multiplied_with_are_refused() -> None:
    with pytest.raises(InvalidJob) as raised:
        described(**pixels(60))
    assert str(raised.value) == (
        "train: sample weights of shape [n] do not fit the loss binary_crossentropy, which has "
        "shape [n, 6, 6] for a model whose output has shape [n, 6, 6, 1]; expected [n, 1, 1], one "
        "for each record, or [n, 6, 6]"
    )
    for shape in ((60, 1, 1), (60, 6, 6), (60, 6, 1), (60, 1, 1, 1)):
        assert described(**pixels(*shape))["train_records"] == 60


def test_an_error_of_a_library_is_one_line() -> None:
    with pytest.raises(UserCodeFailed) as raised:
        described(train=Arrays(np.ones((60, 9), np.float32), np.arange(60) % 3))
    assert "the model raised" in str(raised.value)
    assert "\n" not in str(raised.value)
