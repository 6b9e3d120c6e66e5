"""Factors of the learning rate, and that neither engine does anything else with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pserver.core.counters import Rates
from pserver.updates.engine import EngineKind
from tests.pserver.engine_cases import (
    Shards,
    Values,
    gradients,
    initial,
    plain_keras,
    schedule,
    serialized,
)

STEPS = 4
SCALE = 0.25


def test_nothing_asked_for_is_exactly_one() -> None:
    assert [Rates().factor(i, 7) for i in (0, 1, 1000)] == [1.0, 1.0, 1.0]


def test_the_scale_is_reached_in_a_straight_line() -> None:
    rates = Rates(scale=8.0, warmup_updates=4)
    assert [rates.factor(i) for i in (0, 1, 2, 3, 4, 5)] == [1.0, 2.75, 4.5, 6.25, 8.0, 8.0]
    assert Rates(scale=8.0).factor(0) == 8.0
    assert Rates(scale=1.0, warmup_updates=4).factor(2) == 1.0


def test_stale_gradients_count_less_where_that_is_asked_for() -> None:
    rates = Rates(scale=8.0, warmup_updates=4, inverse=True)
    assert [rates.factor(4, s) for s in (0, 1, 3)] == [8.0, 4.0, 2.0]
    assert rates.factor(2, 2) == 1.5


def _exponential(rate: float) -> dict[str, Any]:
    return schedule(
        "ExponentialDecay",
        initial_learning_rate=rate,
        decay_steps=3,
        decay_rate=0.5,
        staircase=False,
    )


def _optimizer(name: str, rate: float) -> dict[str, Any]:
    kind, _, scheduled = name.partition(", ")
    given = {"learning_rate": _exponential(rate) if scheduled else rate}
    match kind:
        case "momentum":
            return serialized("SGD", momentum=0.9, **given)
        case "clipnorm":
            return serialized("Adam", clipnorm=1.0, **given)
        case "AdamW" | "Muon":
            return serialized(kind, weight_decay=0.05, **given)
    return serialized(kind, **given)


WHOLE = ("clipnorm", "Muon")
CUT = ("SGD", "momentum", "Adam", "AdamW", "SGD, schedule", "AdamW, schedule")
CASES = [
    *(("numpy", name, 2) for name in CUT),
    *(("keras", name, 2) for name in CUT),
    *(("keras", name, 1) for name in WHOLE),
]


def trained(kind: EngineKind, optimizer: dict[str, Any], shards: int, scale: float) -> Shards:
    made = Shards(kind, optimizer, shards)
    for step in range(STEPS):
        parts = made.cut(gradients(step))
        for engine, part, buffers in zip(made.engines, parts, made._buffers, strict=True):
            for name, array in part.items():
                np.copyto(buffers[name], array)
            engine.apply(buffers, scale)
    return made


def assert_close(found: Values, expected: Values) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "shards"), CASES)
def test_a_scaled_step_is_that_of_an_optimizer_with_another_rate(
    kind: EngineKind, name: str, shards: int
) -> None:
    rate = 0.04
    made = trained(kind, _optimizer(name, rate), shards, SCALE)
    expected = plain_keras(_optimizer(name, rate * SCALE), STEPS)
    assert_close(made.values(), expected)
    # It is far from what it would be without.
    unscaled = plain_keras(_optimizer(name, rate), STEPS)
    assert max(np.abs(unscaled[n] - expected[n]).max() for n in expected) > 1e-3
    assert [engine.slots().iterations for engine in made.engines] == [STEPS] * shards


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numpy", "keras"])
def test_a_scale_of_one_has_the_bits_of_none(kind: EngineKind) -> None:
    optimizer = _optimizer("AdamW, schedule", 0.04)
    scaled = trained(kind, optimizer, 2, 1.0).values()
    made = Shards(kind, optimizer, 2)
    made.train(range(STEPS))
    for name, value in made.values().items():
        assert scaled[name].tobytes() == value.tobytes(), name


@pytest.mark.slow
def test_another_scale_needs_no_other_function() -> None:
    made = Shards("keras", _optimizer("SGD", 1.0), 1)
    engine = made.engines[0]
    buffers = made._buffers[0]
    for array in buffers.values():
        array.fill(1.0)
    for scale in (0.5, 0.25, 1.0, 0.125):
        engine.apply(buffers, scale)
    assert len(engine._steps) == 2  # type: ignore[attr-defined]
    start, found = initial(), made.values()
    np.testing.assert_allclose(found["net/scale"], start["net/scale"] - 1.875, rtol=1e-6)
