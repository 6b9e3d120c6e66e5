"""Optimizers in the keras engine: compiled or not, refused, and their schedules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import structlog.testing

from pserver.updates.allowlist import weight_decay_exclusions
from pserver.updates.factory import make_engine
from pserver.updates.keras_objects import keras_slot_names
from pserver.updates.schedules import make_schedule
from psrpc.core.errors import CheckpointError, InvalidJob
from psrpc.core.placement import make_plan
from psrpc.core.plan import Placement, VariableSpec
from tests.pserver.engine_cases import (
    CONSTRAINED,
    MODEL,
    Shards,
    plain_keras,
    schedule,
    serialized,
)

pytestmark = pytest.mark.slow


def test_slots_of_another_optimizer_are_refused() -> None:
    adam, lamb = (Shards("keras", serialized(n), 1).engines[0] for n in ("Adam", "Adafactor"))
    with pytest.raises(CheckpointError, match=r"missing.* v/float32.*unknown momentums/float32"):
        lamb.load_slots(adam.slots())
    with pytest.raises(CheckpointError, match="missing momentums/float32"):
        adam.load_slots(lamb.slots())


@pytest.mark.parametrize(("held", "said"), [("a list", "1 variables in more"), ("", "in no attr")])
def test_state_that_this_version_of_keras_keeps_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, held: str, said: str
) -> None:
    import keras

    build = keras.optimizers.SGD.build

    def build_with_more(self: Any, variables: Any) -> None:
        build(self, variables)
        more = self.add_variable((), name="more")
        if held:
            self.more = [more]

    monkeypatch.setattr(keras.optimizers.SGD, "build", build_with_more)
    plan = make_plan(MODEL, 1, "whole")
    with pytest.raises(InvalidJob, match=f"SGD of Keras .* has .*{said}.*which shards cannot keep"):
        keras_slot_names(serialized("SGD", momentum=0.9), plan)


def test_an_optimizer_that_xla_does_not_compile_runs_uncompiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import keras
    import tensorflow as tf

    optimizer = serialized("SGD", learning_rate=0.1)
    expected = plain_keras(optimizer, 2)
    update_step = keras.optimizers.SGD.update_step

    def with_python_inside(self: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
        same = tf.numpy_function(lambda g: g, [gradient], gradient.dtype)
        same.set_shape(gradient.shape)
        update_step(self, same, variable, learning_rate)

    monkeypatch.setattr(keras.optimizers.SGD, "update_step", with_python_inside)
    with structlog.testing.capture_logs() as logs:
        cluster = Shards("keras", optimizer, 1)
    assert [line["optimizer"] for line in logs] == ["SGD"]
    cluster.train(range(2))
    for name, value in cluster.values().items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "default"), [("AdamW", 0.004), ("Muon", 0.004), ("SGD", None)])
def test_variables_without_decay_are_found_on_the_live_optimizer(
    name: str, default: float | None
) -> None:
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    optimizer = getattr(keras.optimizers, name)()
    optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel], var_names=["bias"])
    excluded = weight_decay_exclusions(optimizer, [(v.path, v) for v in model.trainable_variables])
    decayed = model.layers[1].kernel.path
    expected = [v.path for v in model.trainable_variables if v.path != decayed]
    assert excluded == (expected if default else [])


@pytest.mark.parametrize(
    ("optimizer", "variables", "shards", "placement", "message"),
    [
        (serialized("Lamb"), MODEL, 1, "cut", "Lamb needs whole variables"),
        (serialized("SGD"), CONSTRAINED, 1, "cut", "SGD needs whole variables"),
        (serialized("SGD", global_clipnorm=1.0), MODEL, 2, "cut", "global_clipnorm=1.0"),
        (serialized("SGD", momentum=2.0), MODEL, 1, "cut", "Keras refuses.*momentum"),
        (serialized("SGD", betta=2.0), MODEL, 1, "cut", "Keras refuses.*betta"),
        (
            serialized("AdamW") | {"excluded_from_weight_decay": ["bias"]},
            MODEL,
            1,
            "whole",
            "names bias: no such variable",
        ),
    ],
)
def test_jobs_that_the_plan_cannot_give_are_refused(
    optimizer: dict[str, Any],
    variables: tuple[VariableSpec, ...],
    shards: int,
    placement: Placement,
    message: str,
) -> None:
    with pytest.raises(InvalidJob, match=message):
        make_engine("keras", optimizer, make_plan(variables, shards, placement), 0)


@pytest.mark.parametrize(
    "document",
    [
        schedule(
            "ExponentialDecay",
            initial_learning_rate=0.1,
            decay_steps=7,
            decay_rate=0.9,
            staircase=True,
        ),
        schedule("PiecewiseConstantDecay", boundaries=[3, 50], values=[0.3, 0.2, 0.1]),
        schedule(
            "PolynomialDecay",
            initial_learning_rate=0.1,
            decay_steps=30,
            end_learning_rate=0.02,
            power=0.5,
            cycle=False,
        ),
        schedule(
            "PolynomialDecay",
            initial_learning_rate=0.1,
            decay_steps=30,
            end_learning_rate=0.02,
            power=2.0,
            cycle=True,
        ),
        schedule(
            "InverseTimeDecay",
            initial_learning_rate=0.1,
            decay_steps=7,
            decay_rate=0.9,
            staircase=False,
        ),
        schedule(
            "CosineDecay",
            initial_learning_rate=0.1,
            decay_steps=70,
            alpha=0.01,
            warmup_target=None,
            warmup_steps=9,
        ),
        schedule(
            "CosineDecay",
            initial_learning_rate=0.01,
            decay_steps=70,
            alpha=0.01,
            warmup_target=0.1,
            warmup_steps=9,
        ),
        schedule(
            "CosineDecayRestarts",
            initial_learning_rate=0.1,
            first_decay_steps=10,
            t_mul=2.0,
            m_mul=0.8,
            alpha=0.01,
        ),
        schedule(
            "CosineDecayRestarts",
            initial_learning_rate=0.1,
            first_decay_steps=10,
            t_mul=1.0,
            m_mul=0.8,
            alpha=0.01,
        ),
    ],
    ids=lambda document: document["class_name"],
)
def test_schedules_in_numpy_are_those_of_keras(document: dict[str, Any]) -> None:
    import keras

    expected = getattr(keras.optimizers.schedules, document["class_name"])(**document["config"])
    rate = make_schedule(document)
    for step in (*range(32), 49, 50, 51, 69, 70, 71, 90, 150):
        # Absolute, for the floor: at the foot of a cosine 1 + cos(x) has no digits left.
        np.testing.assert_allclose(rate(step), float(expected(step)), rtol=1e-6, atol=1e-8)
