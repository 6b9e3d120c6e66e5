"""Validation in the process that called ``fit``."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from worker import Arrays
from worker.fit.validation import Validation

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("weighted", [False, True])
def test_results_are_those_of_evaluate(weighted: bool) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=["mae"], weighted_metrics=["mse"])
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=(10, width)).astype("float32") for width in (3, 2))
    weights: tuple[Any, ...] = (np.linspace(0, 1, 10, dtype="float32"),) if weighted else ()
    validation = Validation(model, Arrays(x, y, *weights), 4)
    assert validation.steps == 3
    known = model.evaluate(x, y, 4, sample_weight=[*weights, None][0], verbose=0, return_dict=True)
    assert validation.evaluate() == known
    # Not together with those before.
    assert validation.evaluate() == known
