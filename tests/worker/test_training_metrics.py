"""Metrics of training data: what batches add up to is what ``keras.Model.fit`` shows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from psrpc.batch import BatchId
from psrpc.v1 import coordinator_pb2 as pb
from tests.worker.flat_bench import (
    CPU,
    RECORDS,
    Bench,
    Line,
    dense_model,
    line_loss,
    make_job,
    records,
)
from worker.evaluator import Evaluator
from worker.flat import FlatStep

pytestmark = pytest.mark.slow

METRICS = [
    "accuracy",
    keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top2"),
    lambda: keras.metrics.SparseCategoricalCrossentropy(name="entropy"),
]


def batches(size: int) -> list[BatchId]:
    return [BatchId(0, at, min(size, RECORDS - at)) for at in range(0, RECORDS, size)]


def counting(bench: Bench) -> Bench:
    step = bench.replica.make_step(bench.plan, counts=True)
    bench.step = FlatStep(step, bench.plan, CPU)
    return bench


def merge(bench: Bench, total: float, metrics: Any) -> dict[str, float]:
    states = [
        pb.MetricVariable(shape=[2], values=[total, RECORDS]),
        pb.MetricVariable(shape=[len(metrics)], values=metrics),
    ]
    message = pb.MergeEvaluation(
        evaluation="training of epoch-1",
        states=pb.MetricStates(variables=states),
        training=True,
    )
    return dict(Evaluator(bench.replica, bench.plan, CPU).merge(message).results)


def test_states_of_batches_add_up_to_what_keras_counts() -> None:
    bench = counting(Bench(make_job(dense_model, metrics=METRICS)))
    total, states = 0.0, np.zeros(0)
    for batch in batches(7):
        result = bench.run(batch)
        total += result.loss * batch.count
        states = np.add(states, result.metrics) if states.size else np.array(result.metrics)
    found = merge(bench, total, states)

    model = bench.replica.model
    fresh = [
        keras.metrics.SparseCategoricalAccuracy(),
        keras.metrics.SparseTopKCategoricalAccuracy(k=2),
        keras.metrics.SparseCategoricalCrossentropy(),
    ]
    for batch in batches(7):
        x, y = bench.job.train.read(bench.job.seed, batch)
        for metric in fresh:
            metric.update_state(y, model(x, training=True))
    expected = [float(metric.result()) for metric in fresh]
    assert set(found) == {"loss", "accuracy", "top2", "entropy"}
    named = [found["accuracy"], found["top2"], found["entropy"]]
    assert named == pytest.approx(expected, rel=1e-5)
    assert found["loss"] == pytest.approx(total / RECORDS)


def test_an_epoch_that_was_counted_with_other_metrics_keeps_its_loss() -> None:
    """A run was resumed with other metrics before the totals were turned into results."""
    bench = Bench(make_job(dense_model, metrics=METRICS))
    assert merge(bench, 2.0 * RECORDS, [1.0, 2.0]) == {"loss": pytest.approx(2.0)}


def test_counting_leaves_the_gradient_as_it_is() -> None:
    plain = Bench(make_job(dense_model, metrics=METRICS))
    counted = counting(Bench(make_job(dense_model, metrics=METRICS)))
    one, other = (bench.run(BatchId(0, 0, 8)) for bench in (plain, counted))
    assert one.metrics == ()
    assert len(other.metrics) == 6
    assert one.loss == other.loss
    for name, gradient in plain.by_variable(one).items():
        np.testing.assert_array_equal(gradient, counted.by_variable(other)[name])


def test_losses_of_several_outputs_are_counted_for_each_batch_alone() -> None:
    def build() -> keras.Model:
        inputs = keras.Input((6,))
        outputs = [keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")]
        return keras.Model(inputs, outputs)

    def labels(x: Any, _y: Any) -> Any:
        return x, (x[:, :1], x[:, 1:2])

    job = make_job(build, loss={"a": "mse", "b": "mse"}, train=records(map=labels))
    bench = counting(Bench(job))
    first, second = bench.run(BatchId(0, 0, 8)), bench.run(BatchId(0, 0, 8))
    assert len(first.metrics) == 4
    assert first.metrics == second.metrics
    found = merge(bench, first.loss * RECORDS, first.metrics)
    assert found["a_loss"] + found["b_loss"] == pytest.approx(first.loss, rel=1e-5)


def test_metrics_with_too_many_variables_are_left_out() -> None:
    metrics = [lambda: keras.metrics.AUC(num_thresholds=400)]

    def labels(x: Any, y: Any) -> Any:
        return x, (y > 0).astype(np.float32)[:, None]

    def build() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, "sigmoid")])

    job = make_job(build, loss="binary_crossentropy", metrics=metrics, train=records(map=labels))
    assert counting(Bench(job)).run(BatchId(0, 0, 8)).metrics == ()


def test_a_module_has_its_loss_alone() -> None:
    job = make_job(Line, loss=line_loss, train=records(map=lambda x, _y: (x, x)))
    assert counting(Bench(job)).run(BatchId(0, 0, 8)).metrics == ()
