"""Metrics of training data: what batches add up to is what ``keras.Model.fit`` shows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from psrpc.core.batch import BatchId
from psrpc.options.job_keys import UserCodeFailed
from psrpc.v1 import coordinator_pb2 as pb
from tests.worker.described_jobs import described
from tests.worker.flat_jobs import (
    CLASSES,
    CPU,
    RECORDS,
    JobStepper,
    Line,
    dense_model,
    line_loss,
    make_job,
    records,
)
from worker import Arrays
from worker.model.metrics import build_metrics
from worker.step.evaluator import Evaluator
from worker.step.flat import FlatStep

pytestmark = pytest.mark.slow

METRICS = [
    "accuracy",
    keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top2"),
    lambda: keras.metrics.SparseCategoricalCrossentropy(name="entropy"),
]


def batches(size: int) -> list[BatchId]:
    return [BatchId(0, at, min(size, RECORDS - at)) for at in range(0, RECORDS, size)]


def counting(stepper: JobStepper) -> JobStepper:
    step = stepper.replica.make_step(stepper.plan, counts=True)
    stepper.step = FlatStep(step, stepper.plan, CPU)
    return stepper


class Calls:
    """Counts the Python calls of a model, which are traces within a step."""

    def __init__(self, model: keras.Model) -> None:
        self.count = 0
        self._call = model.call
        model.call = self

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        self.count += 1
        return self._call(*inputs, **options)


def merge(stepper: JobStepper, total: float, metrics: Any) -> dict[str, float]:
    states = [
        pb.MetricVariable(shape=[2], values=[total, RECORDS]),
        pb.MetricVariable(shape=[len(metrics)], values=metrics),
    ]
    message = pb.MergeEvaluation(
        evaluation="training of epoch-1",
        states=pb.MetricStates(variables=states),
        training=True,
    )
    return dict(Evaluator(stepper.replica, stepper.plan, CPU).merge(message).results)


def test_states_of_batches_add_up_to_what_keras_counts() -> None:
    """Each batch shape is traced once, although the first makes the metrics' variables."""
    stepper = counting(JobStepper(make_job(dense_model, metrics=METRICS)))
    total, states = 0.0, np.zeros(0)
    traced = Calls(stepper.replica.model)
    for batch in batches(7):
        result = stepper.run(batch)
        total += result.loss * batch.count
        states = np.add(states, result.metrics) if states.size else np.array(result.metrics)
    assert traced.count == len({batch.count for batch in batches(7)})
    found = merge(stepper, total, states)

    model = stepper.replica.model
    fresh = [
        keras.metrics.SparseCategoricalAccuracy(),
        keras.metrics.SparseTopKCategoricalAccuracy(k=2),
        keras.metrics.SparseCategoricalCrossentropy(),
    ]
    for batch in batches(7):
        x, y = stepper.job.train.read(stepper.job.seed, batch)
        for metric in fresh:
            metric.update_state(y, model(x, training=True))
    expected = [float(metric.result()) for metric in fresh]
    assert set(found) == {"loss", "accuracy", "top2", "entropy"}
    named = [found["accuracy"], found["top2"], found["entropy"]]
    assert named == pytest.approx(expected, rel=1e-5)
    assert found["loss"] == pytest.approx(total / RECORDS)


def test_an_epoch_that_was_counted_with_other_metrics_keeps_its_loss() -> None:
    """A run was resumed with other metrics before the totals were turned into results."""
    stepper = JobStepper(make_job(dense_model, metrics=METRICS))
    assert merge(stepper, 2.0 * RECORDS, [1.0, 2.0]) == {"loss": pytest.approx(2.0)}


def test_counting_leaves_the_gradient_as_it_is() -> None:
    plain = JobStepper(make_job(dense_model, metrics=METRICS))
    counted = counting(JobStepper(make_job(dense_model, metrics=METRICS)))
    one, other = (stepper.run(BatchId(0, 0, 8)) for stepper in (plain, counted))
    assert one.metrics == ()
    assert len(other.metrics) == 6
    assert one.loss == other.loss
    for name, gradient in plain.by_variable(one).items():
        np.testing.assert_array_equal(gradient, counted.by_variable(other)[name])


def test_a_metric_of_a_function_that_keras_does_not_know_is_made_anew() -> None:
    def power(y_true: Any, y_pred: Any, exponent: float) -> Any:
        return keras.ops.abs(y_true - y_pred) ** exponent

    metric = keras.metrics.MeanMetricWrapper(power, name="cube", exponent=3.0)
    (made,) = build_metrics(
        make_job(dense_model, metrics=[metric]), dense_model(), *[np.ones(2)] * 2
    )
    assert made is not metric
    made.update_state(np.array([1.0, 4.0]), np.array([3.0, 4.0]))
    assert (made.name, float(made.result()), float(metric.result())) == ("cube", 4.0, 0.0)


@pytest.mark.parametrize("by", ["sample", "class"])
def test_weighted_metrics_weigh_as_keras_does(by: str) -> None:
    def build() -> keras.Model:
        model = dense_model()
        entropy = keras.metrics.SparseCategoricalCrossentropy(name="entropy")
        model.compile("sgd", job_loss, metrics=["accuracy"], weighted_metrics=["accuracy", entropy])
        return model

    job_loss = "sparse_categorical_crossentropy"
    classes = {each: 0.5 + each for each in range(CLASSES)}
    weigh = np.vectorize(classes.__getitem__)

    def weighted(x: Any, y: Any) -> Any:
        return (x, y, weigh(y).astype(np.float32)) if by == "sample" else (x, y)

    job = make_job(
        build,
        loss=None,
        optimizer=None,
        train=records(map=weighted),
        class_weight=None if by == "sample" else classes,
    )
    stepper = counting(JobStepper(job))
    results = [(stepper.run(batch), batch.count) for batch in batches(7)]
    total = sum(result.loss * count for result, count in results)
    found = merge(stepper, total, np.sum([result.metrics for result, _ in results], axis=0))

    model = build()
    model.set_weights([weight.numpy() for weight in stepper.replica.model.weights])
    x, y, *_ = stepper.job.train.read(stepper.job.seed, BatchId(0, 0, RECORDS))
    expected = model.evaluate(x, y, sample_weight=weigh(y), verbose=0, return_dict=True)
    assert set(found) == {"loss", "accuracy", "weighted_accuracy", "entropy"}
    assert found["weighted_accuracy"] != found["accuracy"]
    for name in ("accuracy", "weighted_accuracy", "entropy"):
        assert found[name] == pytest.approx(float(expected[name]), rel=1e-5), name


def test_losses_of_several_outputs_are_counted_for_each_batch_alone() -> None:
    def build() -> keras.Model:
        inputs = keras.Input((6,))
        outputs = [keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")]
        return keras.Model(inputs, outputs)

    def labels(x: Any, _y: Any) -> Any:
        return x, (x[:, :1], x[:, 1:2])

    job = make_job(build, loss={"a": "mse", "b": "mse"}, train=records(map=labels))
    stepper = counting(JobStepper(job))
    first, second = stepper.run(BatchId(0, 0, 8)), stepper.run(BatchId(0, 0, 8))
    assert len(first.metrics) == 4
    assert first.metrics == second.metrics
    found = merge(stepper, first.loss * RECORDS, first.metrics)
    assert found["a_loss"] + found["b_loss"] == pytest.approx(first.loss, rel=1e-5)


def test_metrics_with_too_many_variables_are_left_out() -> None:
    metrics = [lambda: keras.metrics.AUC(num_thresholds=400)]

    def labels(x: Any, y: Any) -> Any:
        return x, (y > 0).astype(np.float32)[:, None]

    def build() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, "sigmoid")])

    job = make_job(build, loss="binary_crossentropy", metrics=metrics, train=records(map=labels))
    assert counting(JobStepper(job)).run(BatchId(0, 0, 8)).metrics == ()


def test_a_module_has_its_loss_alone() -> None:
    job = make_job(Line, loss=line_loss, train=records(map=lambda x, _y: (x, x)))
    assert counting(JobStepper(job)).run(BatchId(0, 0, 8)).metrics == ()


def films(labels: Any) -> Arrays:
    texts = np.array(["bad film", "good film", "film"])
    return Arrays(texts[np.arange(RECORDS) % 3], labels)


def text_model(*after: Any) -> keras.Model:
    layers = keras.layers
    words = layers.TextVectorization(vocabulary=["bad", "good", "film"])
    return keras.Sequential(
        [keras.Input((), dtype="string"), words, layers.Embedding(9, 4), *after]
    )


def sentiment_model() -> keras.Model:
    return text_model(keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1, "sigmoid"))


F1 = keras.metrics.F1Score(threshold=0.5)


@pytest.mark.parametrize(
    ("metric", "column"), [("auc", False), ("auc", True), ("accuracy", False), (F1, True)]
)
def test_a_model_that_hides_how_many_records_it_has_is_counted(metric: Any, column: bool) -> None:
    """TensorFlow does not know how many records a TextVectorization gives."""
    labels = np.arange(RECORDS) % 2
    data = films(labels[:, None] if column else labels)
    fields: dict[str, Any] = {"loss": "binary_crossentropy", "metrics": [metric], "train": data}
    stepper = counting(JobStepper(make_job(sentiment_model, **fields)))
    found = [stepper.run(batch) for batch in batches(8)]
    total = sum(each.loss * batch.count for each, batch in zip(found, batches(8), strict=True))
    got = merge(stepper, total, np.sum([each.metrics for each in found], axis=0))

    model = stepper.replica.model
    model.compile(loss="binary_crossentropy", metrics=[metric])
    x, y = data.read_range(0, RECORDS)
    wanted = model.evaluate(tf.constant(x), y, batch_size=8, verbose=0, return_dict=True)
    assert got == {name: pytest.approx(value, rel=1e-5) for name, value in wanted.items()}


def test_dimensions_unknown_in_the_output_come_from_the_labels() -> None:
    """A label for each word: the output is as long as the longest text of a batch."""
    model = lambda: text_model(keras.layers.Dense(CLASSES, "softmax"))  # noqa: E731
    data = films(np.arange(2 * RECORDS).reshape(RECORDS, 2) % CLASSES)
    metric = keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False)
    stepper = counting(JobStepper(make_job(model, train=data, metrics=[metric])))
    assert sum(stepper.run(batches(8)[0]).metrics) == 16


class Compiled(keras.metrics.Mean):  # type: ignore[misc]
    """Asks tensors for values, which those of a compiled step do not have."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        del sample_weight
        super().update_state(float(tf.reduce_sum(y_pred)) * float(tf.size(y_true)))


def test_a_metric_that_cannot_be_compiled_is_named_when_the_job_is_read() -> None:
    metric = Compiled(name="total")
    with pytest.raises(UserCodeFailed, match=r"^metric total raised .*; labels have shape \[n\], "):
        described(metrics=[metric])
    stepper = counting(JobStepper(make_job(dense_model, metrics=[metric])))
    with pytest.raises(UserCodeFailed, match=r"^metric total raised "):
        stepper.run(batches(8)[0])
