"""Finds metrics that add up: the state after two batches is the sum of the states after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from worker.model.build import BY_OUTPUT

PART = 8
"""Number of records of each of the two test batches."""


def not_summable(metrics: Sequence[Any], updates: Sequence[Callable[[], None]]) -> list[Any]:
    """Returns the ``metrics`` whose state after both ``updates`` is not the sum of the states after
    each, such as a running maximum. Leaves their states unchanged.

    A state that happens to be zero after one of the updates proves nothing.

    Args:
        updates: each counts one batch in all metrics, whose variables exist already.
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
    """Whether Keras defines the class of ``metric``; all such metrics add up."""
    return type(metric).__module__.partition(".")[0] == "keras"


def parts(metrics: Sequence[Any]) -> list[Any]:
    """Returns ``metrics`` with Keras's collection for several outputs replaced by its members."""
    found: list[Any] = []
    for metric in metrics:
        found += metric.metrics if metric.name == BY_OUTPUT else [metric]
    return found


def summable_results(metric: Any, names: Sequence[str]) -> list[str]:
    """Returns those of ``names`` that may be results of ``metric``: its own name, maybe after the
    name of an output."""
    return [n for n in names if n == metric.name or n.endswith(f"_{metric.name}")]


def _state(metric: Any) -> list[np.ndarray]:
    # A copy, since the tensor may share the variable's memory.
    return [variable.value.numpy().astype(np.float64) for variable in metric.variables]


def _adds_up(one: list[np.ndarray], other: list[np.ndarray], both: list[np.ndarray]) -> bool:
    return all(
        np.allclose(a + b, whole, rtol=1e-3, atol=1e-5, equal_nan=True)
        for a, b, whole in zip(one, other, both, strict=True)
    )
