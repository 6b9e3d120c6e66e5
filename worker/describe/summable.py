"""Which metrics add up: the state after two batches is the sum of the states after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from worker.model.build import BY_OUTPUT

PART = 8
"""Records of each of the two batches that are tried."""


def not_summable(metrics: Sequence[Any], updates: Sequence[Callable[[], None]]) -> list[Any]:
    """Those of ``metrics`` whose state after both ``updates`` is not the sum of their states after
    each alone, such as a running maximum. Their states are left as they are.

    A state that happens to be zero after one of the updates shows nothing.

    Args:
        updates: each counts one batch in all metrics, whose variables are there already.
    """
    states = []
    for which in ((0,), (1,), (0, 1)):
        with keras.StatelessScope():
            for metric in metrics:
                metric.reset_state()
            for index in which:
                updates[index]()
            states.append([_state(metric) for metric in metrics])
    first, second, both = states
    return [
        metric
        for metric, one, other, whole in zip(metrics, first, second, both, strict=True)
        if not _adds_up(one, other, whole)
    ]


def is_kerass_own(metric: Any) -> bool:
    """Whether Keras defines the class of ``metric``; all of these add up."""
    return type(metric).__module__.partition(".")[0] == "keras"


def parts(metrics: Sequence[Any]) -> list[Any]:
    """``metrics``, with those of Keras's collection of several outputs in its place."""
    found: list[Any] = []
    for metric in metrics:
        found += metric.metrics if metric.name == BY_OUTPUT else [metric]
    return found


def results_of(metric: Any, names: Sequence[str]) -> list[str]:
    """Which results of ``names`` may be those of ``metric``: its own name, or that of an output
    before it."""
    return [n for n in names if n == metric.name or n.endswith(f"_{metric.name}")]


def _state(metric: Any) -> list[np.ndarray]:
    # In a scope the value is a tensor of it; a copy, since that may be of the variable's memory.
    return [variable.value.numpy().astype(np.float64) for variable in metric.variables]


def _adds_up(one: list[np.ndarray], other: list[np.ndarray], both: list[np.ndarray]) -> bool:
    return all(
        np.allclose(a + b, whole, rtol=1e-3, atol=1e-5, equal_nan=True)
        for a, b, whole in zip(one, other, both, strict=True)
    )
