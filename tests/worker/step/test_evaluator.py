from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from psrpc.core.errors import InvalidArgument, InvalidJob
from psrpc.core.placement import make_plan
from psrpc.v1 import coordinator_pb2 as pb
from tests.worker.flat_jobs import CLASSES, CPU, Line, line_loss, make_job, noisy_model
from worker import Arrays, Job
from worker.model.variables import model_variables
from worker.runtime.devices import ParameterBuffers
from worker.step.evaluator import Evaluator
from worker.step.replica import Replica

pytestmark = pytest.mark.slow

RECORDS = 45


def eval_data(**extra: Any) -> Arrays:
    generator = np.random.default_rng(1)
    x = generator.normal(size=(RECORDS, 6)).astype(np.float32)
    return Arrays(x, generator.integers(0, CLASSES, RECORDS), **extra)


def make_evaluator(job: Job) -> tuple[Evaluator, ParameterBuffers, Any]:
    """An evaluator, the model's initial values as parameters, and the model."""
    replica = Replica(job)
    plan = make_plan([spec for spec, _ in model_variables(replica.model)], 1, "cut")
    parameters = ParameterBuffers.of(plan)
    for name, values in replica.values(plan).items():
        parameters.arrays[name][:] = values
    return Evaluator(replica, plan, CPU), parameters, replica.model


def summed(tasks: list[list[pb.MetricVariable]]) -> pb.MergeEvaluation:
    """The coordinator's sum of the states of several tasks."""
    variables = [
        pb.MetricVariable(
            shape=parts[0].shape, values=np.sum([part.values for part in parts], axis=0)
        )
        for parts in zip(*tasks, strict=True)
    ]
    return pb.MergeEvaluation(evaluation="final", states=pb.MetricStates(variables=variables))


def test_tasks_of_two_workers_add_up_to_what_keras_evaluates() -> None:
    metrics = [
        "accuracy",
        keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top2"),
        lambda: keras.metrics.SparseCategoricalCrossentropy(name="entropy"),
    ]
    weights = np.linspace(0, 2, RECORDS, dtype=np.float32)
    job = make_job(noisy_model, metrics=metrics, eval=eval_data(sample_weight=weights))
    one, parameters, model = make_evaluator(job)
    other, others, _ = make_evaluator(job)
    tasks = [
        one.states(parameters, 0, 20),
        other.states(others, 20, 33),
        one.states(parameters, 33, RECORDS),
    ]
    # The merge may come to a worker that has not evaluated anything.
    merger, _, _ = make_evaluator(job)
    results = dict(merger.merge(summed(tasks)).results)

    model.compile(
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy", metrics[1], keras.metrics.SparseCategoricalCrossentropy("entropy")],
    )
    assert job.eval is not None
    x, y, w = job.eval.read_range(0, RECORDS)
    expected = model.evaluate(x, y, sample_weight=w, verbose=0, return_dict=True)
    assert list(results) == ["loss", "accuracy", "top2", "entropy"] or set(results) == set(expected)
    for name, value in expected.items():
        assert results[name] == pytest.approx(value, rel=1e-5), name


def test_weighted_metrics_take_the_weights_of_their_output() -> None:
    def build() -> keras.Model:
        inputs = keras.Input((6,))
        outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")}
        model = keras.Model(inputs, outputs)
        model.compile(
            "sgd", {"a": "mse", "b": "mae"}, weighted_metrics={"a": ["mae"], "b": ["mse"]}
        )
        return model

    generator = np.random.default_rng(1)
    x = generator.normal(size=(RECORDS, 6)).astype(np.float32)
    y = {"a": x[:, :1] ** 2, "b": x[:, 1:2]}
    weights = {name: generator.uniform(size=RECORDS).astype(np.float32) for name in y}
    data = Arrays(x, y, weights)
    job = make_job(build, loss=None, optimizer=None, train=data, eval=data)
    evaluator, parameters, model = make_evaluator(job)
    tasks = [evaluator.states(parameters, 0, 20), evaluator.states(parameters, 20, RECORDS)]
    results = dict(evaluator.merge(summed(tasks)).results)
    # Of several batches Keras takes the mean of an output's losses, whatever their sizes.
    whole = {"batch_size": RECORDS, "verbose": 0, "return_dict": True}
    expected = model.evaluate(x, y, sample_weight=weights, **whole)
    assert set(results) == {"loss", "a_loss", "b_loss", "a_mae", "b_mse"} == set(expected)
    for name, value in expected.items():
        assert results[name] == pytest.approx(value, rel=1e-5), name


def test_the_model_is_evaluated_in_inference() -> None:
    job = make_job(noisy_model, metrics=["accuracy"], eval=eval_data())
    evaluator, parameters, _ = make_evaluator(job)
    first, second = (evaluator.states(parameters, 0, RECORDS) for _ in range(2))
    # Dropout would make them differ, and moving averages would move.
    assert [list(state.values) for state in first] == [list(state.values) for state in second]


def test_a_missing_value_among_whole_numbers_is_named_with_its_records() -> None:
    def model() -> keras.Model:
        ids = keras.Input((6,), dtype="int64", name="ids")
        return keras.Model(ids, keras.layers.Dense(CLASSES)(keras.ops.cast(ids, "float32")))

    x = np.ones((RECORDS, 6))
    x[30, 2] = np.nan
    data = Arrays(x, np.zeros(RECORDS, np.int64))
    evaluator, parameters, _ = make_evaluator(make_job(model, eval=data))
    assert evaluator.states(parameters, 0, 24)
    with pytest.raises(InvalidJob, match=r"records 24 to 45: .*'ids' takes int64.*\[nan\]"):
        evaluator.states(parameters, 24, RECORDS)


def test_states_of_other_metrics_are_refused() -> None:
    job = make_job(noisy_model, metrics=["accuracy"], eval=eval_data())
    evaluator, parameters, _ = make_evaluator(job)
    merge = summed([evaluator.states(parameters, 0, 20)])
    del merge.states.variables[2]
    with pytest.raises(InvalidArgument, match="has 1 metric variables; this job's metrics have 2"):
        evaluator.merge(merge)


def test_results_that_are_vectors_get_a_name_each() -> None:
    def f1() -> keras.metrics.Metric:
        return keras.metrics.F1Score(name="f1")

    generator = np.random.default_rng(1)
    x = generator.normal(size=(RECORDS, 6)).astype(np.float32)
    y = np.eye(CLASSES, dtype=np.float32)[generator.integers(0, CLASSES, RECORDS)]
    job = make_job(
        noisy_model,
        loss="categorical_crossentropy",
        metrics=[f1],
        train=Arrays(x, y),
        eval=Arrays(x, y),
    )
    evaluator, parameters, _ = make_evaluator(job)
    results = evaluator.merge(summed([evaluator.states(parameters, 0, RECORDS)])).results
    assert set(results) == {"loss", "f1_0", "f1_1", "f1_2"}


def test_a_module_reports_its_mean_loss() -> None:
    x = np.linspace(1, 3, RECORDS, dtype=np.float32)
    job = make_job(Line, loss=line_loss, train=Arrays(x, 3 * x), eval=Arrays(x, 3 * x))
    evaluator, parameters, _ = make_evaluator(job)
    tasks = [evaluator.states(parameters, 0, 40), evaluator.states(parameters, 40, RECORDS)]
    results = evaluator.merge(summed(tasks)).results
    assert results["loss"] == pytest.approx(float(np.mean((1 - x) ** 2)), rel=1e-5)
    assert tf.executing_eagerly()
