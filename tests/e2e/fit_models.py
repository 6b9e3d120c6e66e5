"""Hands a model of ``__main__`` over to a job: ``python -m tests.e2e.fit_models KIND FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from worker.handover.fitted import write_job_file
from worker.handover.models import hand_over
from worker.handover.refusals import check_fit_model
from worker.handover.spec import EVAL, TRAIN, FitSpec, write_spec
from worker.stored.arguments import training_data
from worker.stored.stored_data import store

FACTOR = 2.0
RECORDS = 48
RNG = np.random.default_rng(5)


def squared(y_true: Any, y_pred: Any) -> Any:
    """Reads a global of ``__main__``."""
    return FACTOR * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


class Distance(keras.metrics.Mean):  # type: ignore[misc]
    """Sums up the distances of a batch."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return super().update_state(keras.ops.abs(y_true - y_pred), sample_weight)


class Gate(keras.layers.Layer):  # type: ignore[misc]
    """Has neither ``get_config`` nor ``**kwargs``."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(units, activation=lambda x: x * FACTOR)

    def call(self, inputs: Any) -> Any:
        return keras.ops.tanh(self.dense(inputs))


class Forecast(keras.Model):  # type: ignore[misc]
    """A model of a class of its own, with a part of its caller's and a loss of its own."""

    def __init__(self, inner: keras.layers.Layer, units: int = 3) -> None:
        super().__init__()
        self.inner = inner
        self.units = units
        self.scale = keras.layers.Normalization()
        self.last = keras.layers.Dense(1)
        self.hidden = keras.layers.Dense(units)

    def call(self, inputs: Any) -> Any:
        return self.last(self.hidden(self.inner(self.scale(inputs))))

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return 3 * super().compute_loss(x, y, y_pred, sample_weight, training)


def floats(*shape: int) -> Any:
    return RNG.normal(size=(RECORDS, *shape)).astype(np.float32)


def sequential() -> tuple[Any, ...]:
    model = keras.Sequential([Gate(8), keras.layers.Dense(1)])
    rate = keras.optimizers.schedules.CosineDecay(0.05, 100)
    model.compile(
        keras.optimizers.Adam(rate),
        squared,
        metrics=[Distance(name="distance")],
        weighted_metrics=["mae"],
    )
    return model, floats(4), floats(1), RNG.uniform(size=RECORDS).astype(np.float32)


def two() -> tuple[Any, ...]:
    one, other = keras.Input((4,), name="one"), keras.Input((3,), name="other")
    hidden = keras.layers.BatchNormalization()(keras.layers.concatenate([one, other]))
    hidden = keras.layers.Dropout(0.2)(keras.layers.Dense(6)(hidden))
    number = keras.layers.Dense(1, name="number")(hidden)
    kind = keras.layers.Dense(3, activation="softmax", name="kind")(hidden)
    model = keras.Model([one, other], {"number": number, "kind": kind})
    model.compile(
        "sgd",
        {"number": squared, "kind": "sparse_categorical_crossentropy"},
        loss_weights={"number": 0.5, "kind": 1.0},
        metrics={"number": [Distance(name="distance")], "kind": ["accuracy"]},
    )
    y = {"number": floats(1), "kind": RNG.integers(0, 3, RECORDS)}
    return model, [floats(4), floats(3)], y


def image() -> tuple[Any, ...]:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model, floats(8, 8, 1), RNG.integers(0, 3, RECORDS)


def subclassed() -> tuple[Any, ...]:
    model = Forecast(Gate(5))
    x = floats(4)
    model.scale.adapt(x)
    model.compile(keras.optimizers.RMSprop(0.01), "mse", metrics=["mae"])
    return model, x, floats(1)


def text() -> tuple[Any, ...]:
    words = keras.layers.TextVectorization(output_sequence_length=3)
    words.adapt(["to be or", "not to be"])
    inputs = keras.Input((), dtype="string")
    hidden = keras.layers.Embedding(words.vocabulary_size(), 4)(words(inputs))
    outputs = keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(hidden))
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse")
    return model, np.array(["to be", "or not"] * (RECORDS // 2)), floats(1)


def mixed() -> tuple[Any, ...]:
    keras.config.set_dtype_policy("mixed_float16")
    model = Forecast(keras.layers.Dense(4, activation=tf.nn.relu))
    x = floats(4)
    model.scale.adapt(x)
    model.compile("adam", "mse")
    return model, x, floats(1)


KINDS = {each.__name__: each for each in (sequential, two, image, subclassed, text, mixed)}


def main() -> None:
    """Writes the folder."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    model, x, y, *weights = KINDS[kind]()
    check_fit_model(model)
    hand_over(folder, model, x)
    # As many records that a round ends with the epoch.
    data = training_data(
        x, y, sample_weight=(*weights, None)[0], batch_size=16, validation_data=(x, y, *weights)
    )
    train, held_out = (
        store(folder / name, each) for name, each in zip((TRAIN, EVAL), data, strict=True) if each
    )
    write_job_file(folder)
    write_spec(folder, FitSpec(train=train, eval=held_out, batch_size=16, epochs=2, seed=3))
    np.savez(folder / "begun.npz", **{each.path: each.numpy() for each in model.trainable_weights})


if __name__ == "__main__":
    main()
