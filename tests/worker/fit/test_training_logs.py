"""Loss and metrics of training as a caller of ``fit`` sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from psrpc.checkpoint.checkpoint import ShardState
from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidJob
from psrpc.core.placement import make_plan
from psrpc.core.plan import VariableSpec
from tests.psrpc.builders import write_and_commit
from tests.worker.flat_jobs import CPU, FEATURES, RECORDS, JobStepper, make_job, records
from worker.fit.training_logs import (
    build_as_fit,
    kept_epochs,
    merged_metrics,
    totals,
    unsummed_metrics,
)
from worker.step.flat import FlatStep

layers = keras.layers


class Seen(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Keeps a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = keras.metrics.Mean(name="input_mean")

    def call(self, x: Any) -> Any:
        self.mean.update_state(x)
        return x


def plain() -> keras.Model:
    model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(3, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def measured() -> keras.Model:
    model = keras.Sequential([keras.Input((FEATURES,)), Seen(), layers.Dense(3, "softmax")])
    top2 = keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="a_top2")
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy", top2])
    return model


def of_two_outputs() -> keras.Model:
    x = keras.Input((FEATURES,))
    outputs = {name: layers.Dense(1, name=name)(x) for name in ("b", "a")}
    model = keras.Model(x, outputs)
    losses = {"a": "mse", "b": "mae"}
    model.compile("sgd", losses, loss_weights={"a": 2.0, "b": 1.0}, metrics={"b": ["mse"]})
    return model


def two_labels(x: Any, _y: Any) -> Any:
    return x, {"b": x[:, :1], "a": x[:, 1:2]}


CASES = [(plain, None), (measured, None), (of_two_outputs, two_labels)]


def counted(make: Callable[[], keras.Model], labels: Any) -> tuple[Sequence[float], Any]:
    """The totals of an epoch, as workers count them, and its records."""
    source = records(map=labels) if labels else records()
    stepper = JobStepper(make_job(make, loss=None, optimizer=None, train=source))
    step = stepper.replica.make_step(stepper.plan, counts=True)
    stepper.step = FlatStep(step, stepper.plan, CPU)
    rows = []
    for first in range(0, RECORDS, 8):
        result = stepper.run(BatchId(0, first, 8))
        rows.append([result.loss * 8, 8.0, *result.metrics])
    return [sum(column) for column in zip(*rows, strict=True)], source.read_range(0, RECORDS)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "labels"), CASES)
def test_logs_are_those_of_fit(make: Callable[[], keras.Model], labels: Any) -> None:
    found, (x, y) = counted(make, labels)
    keras.utils.set_random_seed(0)  # as workers do
    model = make()
    logs: list[dict[str, float]] = []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, given: logs.append(given))
    model.optimizer.learning_rate = 0.0
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback])

    fresh = make()
    build_as_fit(fresh, (x[:2], keras.tree.map_structure(lambda array: array[:2], y)))
    for mirror in (model, fresh):
        merged = merged_metrics(mirror, found)
        assert list(merged) == list(logs[0])
        assert merged == pytest.approx(logs[0], rel=1e-5)
        assert {name: float(merged[name]) for name in merged} == merged
    # A callback may look at the metrics themselves.
    assert float(fresh.metrics[0].result()) == pytest.approx(logs[0]["loss"], rel=1e-5)


def test_a_model_of_strings_is_built() -> None:
    words = layers.TextVectorization(vocabulary=["to", "be"], output_sequence_length=2)
    model = keras.Sequential([words, layers.Embedding(4, 2), layers.Flatten(), layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    build_as_fit(model, (np.array(["to be"], object), np.zeros((1, 1), np.float32)))
    assert model.built
    assert model.optimizer.built


def test_without_the_states_of_metrics_there_is_the_loss() -> None:
    model = measured()
    assert merged_metrics(model, (6.0, 4.0)) == {"loss": 1.5}
    build_as_fit(model, records().read_range(0, 2))
    # No batch was finite.
    logs = merged_metrics(model, (np.nan, 8.0))
    assert np.isnan(logs.pop("loss"))
    assert logs == {"a_top2": 0.0, "accuracy": 0.0, "input_mean": 0.0}


def test_metrics_that_do_not_add_up_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"description": {"unsummed_metrics": ["accuracy"]}}')
    model = measured()
    build_as_fit(model, records().read_range(0, 2))
    row = (6.0, 4.0, *[1.0] * 6)
    assert list(merged_metrics(model, row, unsummed_metrics(tmp_path))) == [
        "a_top2",
        "input_mean",
        "loss",
    ]
    assert kept_epochs(model) == 2**14 // 8


def test_totals_of_other_metrics_are_refused() -> None:
    model = plain()
    with pytest.raises(InvalidJob, match="the job's metrics have 2 numbers, and the model's 0"):
        merged_metrics(model, (6.0, 4.0, 1.0, 4.0))


def test_totals_are_those_of_the_first_shard_and_the_epoch(tmp_path: Path) -> None:
    plan = make_plan([VariableSpec("w", (40,), "float32", "trainable")], 2, "cut")
    one = {"epoch": 0, "applied": [[0, 64]], "skipped": []}
    two = {"epoch": 1, "applied": [[0, 16]], "skipped": [[0, 8]]}
    three = {"epoch": 2, "applied": [[0, 8]], "skipped": [[0, 8]]}
    first = {**one, "totals": [1.5, 64.0, 3.0]}
    second = {**two, "totals": [1.0, 8.0, 2.0]}
    halves = [{a.name: np.zeros(a.shard_length(k), a.dtype) for a in plan.arenas} for k in (0, 1)]
    states = [
        ShardState(halves[0], applied=(first, second, three)),
        ShardState(halves[1], applied=(one, two, three)),
    ]
    (tmp_path / "tmp").mkdir()
    checkpoint = write_and_commit(tmp_path / "tmp", plan, states)
    found = totals(checkpoint)
    assert found.keys() == {0, 1, 2}
    assert found[0] == (1.5, 64.0, 3.0)
    # Left out: a batch of the second epoch, and the only one of the third.
    assert np.isnan(found[1][0])
    assert found[1][1:] == (16.0, 2.0)
    assert np.isnan(found[2][0])
    assert found[2][1:] == (8.0,)
