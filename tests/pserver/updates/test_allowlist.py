"""Optimizers that shards build, their placement, and the effect of overriding the rate."""

from __future__ import annotations

from typing import Any

import pytest

from pserver.updates.allowlist import (
    OPTIMIZERS,
    check_constraint,
    check_optimizer,
    needs_single_shard,
    placement_for,
    with_learning_rate,
)
from psrpc.core.errors import InvalidJob
from psrpc.core.plan import VariableSpec
from tests.pserver.engine_cases import CONSTRAINED, MODEL, NON_NEGATIVE, schedule, serialized

COSINE = schedule(
    "CosineDecay", initial_learning_rate=0.01, decay_steps=5, warmup_target=None, warmup_steps=0
)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_of_keras_passes(name: str) -> None:
    check_optimizer(serialized(name))
    check_optimizer(serialized(name, learning_rate=COSINE, epsilon=1e-7, weight_decay=None))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "is not one that Keras has serialized"),
        ({"class_name": "SGD"}, "is not one that Keras has serialized"),
        (serialized("Sgd"), r"optimizer Sgd cannot be built by the shards; use one of.*, SGD,"),
        (serialized("Optimizer"), "Optimizer cannot be built"),
        (serialized("LossScaleOptimizer"), "pass its inner optimizer"),
        (serialized("MultiOptimizer"), "one optimizer for all variables"),
        (serialized("SGD") | {"module": "mine"}, "SGD from 'mine' cannot be built"),
        (
            serialized("SGD") | {"module": None, "registered_name": "mine>SGD"},
            "SGD from 'mine>SGD' cannot be built",
        ),
        (serialized("SGD", momentum=float("nan")), r"SGD\(momentum=...\) is nan; expected a fin"),
        (serialized("SGD", learning_rate=float("inf")), r"SGD\(learning_rate=...\) is inf"),
        (
            serialized("SGD", clipvalue=float("inf")),
            "is inf; .*no limit, leave it out or say a lar",
        ),
        (serialized("SGD", momentum={"class_name": "x"}), r"SGD\(momentum=...\) is .*numbers"),
        (serialized("Muon", exclude_layers=["a", [{}]]), r"Muon\(exclude_layers=...\) is {}"),
        (serialized("SGD", loss_scale_factor=2.0), "loss_scale_factor=2.0.*leave it out"),
        (
            serialized("SGD", learning_rate={"class_name": "__lambda__", "config": {"value": []}}),
            "learning-rate schedule __lambda__ cannot be built.*CosineDecay,",
        ),
        (
            serialized("SGD", learning_rate=COSINE | {"registered_name": "mine>CosineDecay"}),
            "schedule CosineDecay from 'mine>CosineDecay'",
        ),
        (
            serialized("SGD", learning_rate=schedule("CosineDecay", alpha=COSINE)),
            r"CosineDecay\(alpha=...\) is",
        ),
        (serialized("SGD") | {"excluded_from_weight_decay": "bias"}, "expected variable names"),
    ],
)
def test_anything_else_is_refused_by_name(document: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJob, match=message):
        check_optimizer(document)


def test_constraints() -> None:
    check_constraint(NON_NEGATIVE)
    with pytest.raises(InvalidJob, match=r"constraint Mine from 'job' .*MaxNorm, MinMaxNorm"):
        check_constraint({"module": "job", "class_name": "Mine", "config": {}})


@pytest.mark.parametrize(
    ("optimizer", "variables", "placement"),
    [
        (serialized("SGD", momentum=0.9, clipvalue=1.0), MODEL, "cut"),
        (serialized("Adam", use_ema=True, weight_decay=0.1), MODEL, "cut"),
        (serialized("SGD", global_clipnorm=1.0), MODEL, "cut"),
        (serialized("Adafactor"), MODEL, "whole"),
        (serialized("Lamb"), MODEL, "whole"),
        (serialized("Muon"), MODEL, "whole"),
        (serialized("Adam", clipnorm=1.0), MODEL, "whole"),
        (serialized("SGD"), CONSTRAINED, "whole"),
        (serialized("AdamW") | {"excluded_from_weight_decay": ["w"]}, MODEL, "whole"),
    ],
)
def test_placement(
    optimizer: dict[str, Any], variables: tuple[VariableSpec, ...], placement: str
) -> None:
    assert placement_for(optimizer, variables) == placement


def test_an_unknown_constraint_is_named_with_its_variable() -> None:
    constraint = {"module": "job", "class_name": "Mine", "config": {}}
    variable = VariableSpec("dense/kernel", (2,), "float32", "trainable", constraint)
    with pytest.raises(InvalidJob, match="variable 'dense/kernel': constraint Mine"):
        placement_for(serialized("SGD"), [variable])


def test_only_the_global_norm_needs_one_shard() -> None:
    assert needs_single_shard(serialized("SGD", clipnorm=1.0)) is None
    reason = needs_single_shard(serialized("SGD", global_clipnorm=0.5))
    assert reason is not None
    assert "global_clipnorm=0.5" in reason


def test_a_constant_learning_rate_is_replaced() -> None:
    optimizer = serialized("SGD", momentum=0.9, learning_rate=0.01)
    changed = with_learning_rate(optimizer, 1)
    assert changed["config"] == {"momentum": 0.9, "learning_rate": 1.0}
    assert isinstance(changed["config"]["learning_rate"], float)
    assert optimizer["config"]["learning_rate"] == 0.01


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            {"initial_learning_rate": 0.01, "warmup_target": None},
            {"initial_learning_rate": 0.5, "warmup_target": None},
        ),
        (
            {"initial_learning_rate": 0.0, "warmup_target": 0.1},
            {"initial_learning_rate": 0.0, "warmup_target": 0.5},
        ),
        (
            {"initial_learning_rate": 0.01, "warmup_target": 0.1},
            {"initial_learning_rate": 0.05, "warmup_target": 0.5},
        ),
    ],
)
def test_a_schedule_keeps_its_shape(before: dict[str, Any], after: dict[str, Any]) -> None:
    optimizer = serialized("SGD", learning_rate=schedule("CosineDecay", decay_steps=5, **before))
    changed = with_learning_rate(optimizer, 0.5)["config"]["learning_rate"]
    assert changed == schedule("CosineDecay", decay_steps=5, **after)
    assert optimizer["config"]["learning_rate"]["config"] == {"decay_steps": 5, **before}


def test_a_piecewise_schedule_is_scaled() -> None:
    steps = schedule("PiecewiseConstantDecay", boundaries=[1, 2], values=[0.5, 0.25, 0.125])
    changed = with_learning_rate(serialized("SGD", learning_rate=steps), 1.0)
    assert changed["config"]["learning_rate"]["config"]["values"] == [1.0, 0.5, 0.25]
    steps["config"]["values"] = [0.0, 1.0, 2.0]
    with pytest.raises(InvalidJob, match="starts at 0; change the schedule"):
        with_learning_rate(serialized("SGD", learning_rate=steps), 1.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, True, "0.1"])
def test_a_learning_rate_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(InvalidJob, match=r"optimizer.learning_rate is"):
        with_learning_rate(serialized("SGD"), value)
