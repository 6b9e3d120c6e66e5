"""Models that bring arguments of ``compile`` and overridden methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidJob
from tests.worker.described_jobs import described
from tests.worker.flat_jobs import CLASSES, FEATURES, JobStepper, dense_model, make_job
from tests.worker.step.test_evaluator import make_evaluator, summed
from worker import Arrays, Job
from worker.job.job import Optimizer
from worker.model.compiled import complete

pytestmark = pytest.mark.slow
layers = keras.layers

SPARSE = "sparse_categorical_crossentropy"
RECORDS = 24


def compiled(**arguments: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = dense_model()
        model.compile(**arguments)
        return model

    return build


def overriding(name: str) -> Callable[[], keras.Model]:
    kind = type("Odd", (keras.Model,), {name: lambda *_: None})

    def build() -> keras.Model:
        x = keras.Input((FEATURES,))
        return kind(x, layers.Dense(CLASSES)(x))

    return build


@pytest.mark.parametrize(
    "name",
    [
        *("fit", "evaluate", "train_step", "test_step"),
        *("make_train_function", "make_test_function", "compute_metrics"),
    ],
)
def test_an_overridden_method_that_workers_do_not_call_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidJob, match=rf"Odd overrides {name}\(\), which workers do not call"):
        described(model=overriding(name), metrics=[])


@pytest.mark.parametrize("name", ["predict", "predict_step", "make_predict_function"])
def test_methods_of_prediction_may_be_overridden(name: str) -> None:
    assert described(model=overriding(name), metrics=[], train=make_job(dense_model).train)


def test_a_method_that_is_replaced_on_the_model_itself_is_refused() -> None:
    def build() -> keras.Model:
        model = dense_model()
        model.train_step = lambda *_: {}
        return model

    with pytest.raises(InvalidJob, match=r"overrides train_step\(\)"):
        complete(make_job(build), make_job(build).train.read_range(0, 2))


def test_variables_whose_gradient_is_their_next_value_are_refused() -> None:
    def build() -> keras.Model:
        model = dense_model()
        model.layers[0].quantize("float8")
        return model

    says = r"'sequential/dense/inputs_scale' takes its gradient for its next value"
    with pytest.raises(InvalidJob, match=says) as raised:
        described(model=build, metrics=[], train=make_job(build).train)
    assert raised.value.code == "PS108"


def completed(model: Callable[[], Any], **fields: Any) -> Job:
    job = make_job(model, **fields)
    return complete(job, job.train.read_range(0, 2))[0]


def test_a_job_takes_what_it_does_not_give_from_compile() -> None:
    build = compiled(optimizer=keras.optimizers.Adam(0.25), loss=SPARSE, metrics=["accuracy"])
    job = completed(build, loss=None, optimizer=None)
    assert isinstance(job.optimizer, keras.optimizers.Adam)
    assert float(job.optimizer.learning_rate) == 0.25
    assert (job.loss, list(job.metrics)) == (SPARSE, ["accuracy"])


@pytest.mark.parametrize("compile_", [False, True])
def test_of_a_class_of_losses_one_is_made_as_keras_does(compile_: bool) -> None:
    kind = keras.losses.SparseCategoricalCrossentropy
    build = compiled(optimizer=None, loss=kind) if compile_ else dense_model
    assert isinstance(completed(build, loss=None if compile_ else kind).loss, kind)


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"optimizer": "sgd"}, {"optimizer": keras.optimizers.SGD(), "loss": None}),
    # Keras makes one of each and names the second adam_1.
    ({"optimizer": "adam"}, {"optimizer": "adam", "loss": None}),
    ({"loss": SPARSE}, {"optimizer": None, "loss": keras.losses.SparseCategoricalCrossentropy()}),
    ({"loss": SPARSE}, {"optimizer": None, "loss": keras.losses.SparseCategoricalCrossentropy}),
    ({"loss": keras.losses.SparseCategoricalCrossentropy}, {"optimizer": None, "loss": SPARSE}),
    ({"metrics": ["accuracy"]}, {"optimizer": None, "loss": SPARSE, "metrics": ["accuracy"]}),
]


@pytest.mark.parametrize(("job", "compile_"), SAME)
def test_the_same_in_both_places_is_taken(job: dict[str, Any], compile_: dict[str, Any]) -> None:
    assert completed(compiled(**compile_), **job)


DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"optimizer": keras.optimizers.SGD(0.1)},
        {"optimizer": keras.optimizers.SGD(0.2), "loss": SPARSE},
        r"optimizer is SGD in the job and SGD in compile\(\) of the model; give it in one",
    ),
    ({}, {"loss": SPARSE}, r"optimizer is 'sgd' in the job and RMSprop .*takes rmsprop"),
    ({"loss": "mse"}, {"optimizer": None, "loss": SPARSE}, "loss is 'mse' in the job and 'sparse"),
    (
        {"loss": lambda y, p: keras.losses.mse(y, p)},
        {"optimizer": None, "loss": lambda y, p: keras.losses.mae(y, p)},
        r"loss is <lambda> in the job and <lambda> in compile",
    ),
    (
        {"metrics": ["accuracy"]},
        {"optimizer": None, "loss": SPARSE, "metrics": ["mae"]},
        r"metrics is \['accuracy'\] in the job and \['mae'\] in compile",
    ),
    ({}, {"optimizer": "sgd", "loss": SPARSE, "run_eagerly": True}, "run_eagerly=True, but work"),
]


@pytest.mark.parametrize(("job", "compile_", "says"), DIFFERENT)
def test_compile_settings_that_workers_would_ignore_are_refused(
    job: dict[str, Any], compile_: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidJob, match=says) as raised:
        completed(compiled(**compile_), **job)
    assert raised.value.code == "PS108"


@pytest.mark.parametrize("missing", ["loss", "optimizer"])
def test_a_missing_loss_or_optimizer_is_named(missing: str) -> None:
    fields: dict[str, Optimizer | None] = {missing: None}
    with pytest.raises(InvalidJob, match=rf"the job has no {missing}; give Job\({missing}=...\)"):
        completed(dense_model, **fields)


class OwnLoss(keras.Model):  # type: ignore[misc]
    """Adds a term of its inputs to the loss that it was compiled with."""

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool = True
    ) -> Any:
        total = super().compute_loss(x, y, y_pred, sample_weight, training)
        return total + (0.5 if training else 0.0) * keras.ops.mean(x**2 * y_pred[:, :1])


def own_loss() -> keras.Model:
    x = keras.Input((FEATURES,))
    h = layers.Dense(5, activation="elu", kernel_regularizer=keras.regularizers.L2(0.1))(x)
    return OwnLoss(x, layers.Dense(CLASSES, activation="softmax")(h))


def two_outputs() -> keras.Model:
    x = keras.Input((FEATURES,), name="x")
    h = layers.Dense(5, activation="elu", kernel_regularizer=keras.regularizers.L2(0.1))(x)
    return keras.Model(
        {"x": x}, {"kind": layers.Dense(CLASSES, name="kind")(h), "size": layers.Dense(1)(h)}
    )


def two_records() -> Arrays:
    generator = np.random.default_rng(5)
    x = generator.normal(size=(RECORDS, FEATURES)).astype(np.float32)
    labels = {
        "kind": generator.integers(0, CLASSES, RECORDS),
        "size": generator.normal(size=(RECORDS, 1)).astype(np.float32),
    }
    return Arrays({"x": x}, labels)


TWO: dict[str, Any] = {
    "loss": {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"},
    "loss_weights": {"kind": 1.0, "size": 0.25},
    "metrics": {"kind": ["accuracy"], "size": ["mae"]},
    "train": two_records(),
    "eval": two_records(),
}


@pytest.mark.parametrize(
    ("model", "fields"), [(own_loss, {}), (two_outputs, TWO)], ids=["compute_loss", "two outputs"]
)
def test_the_gradient_is_that_of_keras(
    model: Callable[[], keras.Model], fields: dict[str, Any]
) -> None:
    stepper = JobStepper(make_job(model, **fields))
    batch = BatchId(0, 0, 8)
    found = stepper.by_variable(stepper.run(batch))

    keras.utils.set_random_seed(stepper.job.seed)
    plain = model()
    job = stepper.job
    plain.compile("sgd", loss=job.loss, loss_weights=job.loss_weights)
    for own, theirs in zip(plain.weights, stepper.replica.model.weights, strict=True):
        own.assign(theirs)
    x, y = job.train.read(job.seed, batch)
    with tf.GradientTape() as tape:
        loss = plain.compute_loss(x, y, plain(x, training=True), None)
    gradients = tape.gradient(loss, [v.value for v in plain.trainable_weights])
    expected = [np.asarray(gradient) for gradient in gradients]
    assert stepper.run(batch).loss == pytest.approx(float(loss), rel=1e-6)
    for got, wanted in zip(found.values(), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)


def test_losses_and_metrics_by_output_are_evaluated_as_keras_does() -> None:
    job = make_job(two_outputs, **TWO)
    one, parameters, model = make_evaluator(job)
    other, others, _ = make_evaluator(job)
    tasks = [one.states(parameters, 0, 10), other.states(others, 10, RECORDS)]
    results = dict(one.merge(summed(tasks)).results)
    model.compile("sgd", TWO["loss"], loss_weights=TWO["loss_weights"], metrics=TWO["metrics"])
    assert job.eval is not None
    expected = model.evaluate(*job.eval.read_range(0, RECORDS), verbose=0, return_dict=True)
    assert set(results) == {"loss", "kind_loss", "size_loss", "kind_accuracy", "size_mae"}
    assert results == pytest.approx(expected, rel=1e-5)
    assert set(described(model=two_outputs, **TWO)["metrics"]) == set(results)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"loss": {"kind": "mse", "sizes": "mse"}}, "Expected keys .*'kind'.*'sizes'|sizes"),
        ({"loss_weights": {"kind": 1.0}}, "loss_weights"),
        ({"metrics": {"kinds": ["mae"]}}, "kinds"),
    ],
)
def test_names_that_are_no_outputs_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidJob, match=says):
        described(**{"model": two_outputs, **TWO, **fields})


class Adversarial(keras.Model):  # type: ignore[misc]
    """Is trained by turns, with an optimizer for each."""

    def __init__(self) -> None:
        super().__init__()
        self.one = keras.layers.Dense(3)
        self.d_optimizer = keras.optimizers.Adam()
        self.g_optimizer = keras.optimizers.Adam()

    def call(self, x: Any) -> Any:
        return self.one(x)

    def train_step(self, *_: Any) -> dict[str, Any]:
        return {}


def test_a_model_of_two_optimizers_is_told_that_one_trains_a_job() -> None:
    why = r"several optimizers \(d_optimizer, g_optimizer\); one optimizer trains all variables"
    with pytest.raises(InvalidJob, match=why):
        described(model=Adversarial)
