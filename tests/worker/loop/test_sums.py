"""Sums of gradients that several devices have computed."""

from __future__ import annotations

from typing import Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from psrpc.core.encoding import LARGEST, Encoded, Gradient, round_to
from psrpc.core.placement import make_plan
from psrpc.core.plan import Plan, VariableSpec
from worker.loop.sums import sum_gradients

PLAN: Plan = make_plan(
    (
        VariableSpec("w", (3,), "float32", "trainable"),
        VariableSpec("mean", (2,), "float32", "state"),
        VariableSpec("count", (2,), "int64", "state"),
    ),
    1,
    "cut",
)


def gradient_of(*values: float) -> Gradient:
    """The arenas of one gradient, each filled with one of ``values``, the first in two parts."""
    found = {}
    for arena, each in zip(PLAN.arenas, values, strict=True):
        whole = np.full(arena.length, each, arena.dtype)
        found[arena.name] = Encoded("plain", (whole[:1], whole[1:]))
    return found


def joined(encoded: Encoded) -> list[float]:
    return [float(each) for each in np.concatenate(encoded.parts)]


def test_gradients_and_changes_of_state_add_up_and_what_is_replaced_is_the_last_one() -> None:
    first, second = gradient_of(1, 10, 100), gradient_of(2, 20, 200)
    total = sum_gradients(PLAN, (first, second))
    assert total is not None
    found = {name: joined(encoded) for name, encoded in total.items()}
    expected = {
        arena.name: [float(last if arena.replaced else last * 1.5)] * arena.length
        for arena, last in zip(PLAN.arenas, (2, 20, 200), strict=True)
    }
    assert found == expected
    assert any(arena.replaced for arena in PLAN.arenas)
    # They stay as they are.
    assert joined(first[PLAN.arenas[0].name])[0] == 1.0


def test_an_infinite_sum_is_none() -> None:
    largest = float(np.finfo(np.float32).max)
    assert sum_gradients(PLAN, (gradient_of(largest, 0, 0), gradient_of(largest, 0, 0))) is None


@pytest.mark.parametrize("encoding", ["bfloat16", "float16"])
def test_rounded_gradients_are_added_in_float32_and_rounded_once(
    encoding: Literal["bfloat16", "float16"],
) -> None:
    values: npt.NDArray[np.float32] = np.array([1, 3e-3, 60000], np.float32)
    rounded = round_to(values, encoding)
    gradient = {**gradient_of(0, 0, 0), PLAN.arenas[0].name: Encoded(encoding, (rounded,))}
    total = sum_gradients(PLAN, (gradient, gradient, gradient))
    assert total is not None
    (part,) = total[PLAN.arenas[0].name].parts
    wide = rounded.astype(np.float32)
    expected = round_to(wide + wide + wide, encoding)
    assert part.tobytes() == expected.tobytes()
    assert part.dtype in (ml_dtypes.bfloat16, np.float16)
    # Beyond float16 it is the largest number of that, as a single gradient would be.
    assert float(part[2]) == min(float(expected[2]), float(LARGEST[encoding]))
    assert np.isfinite(wide + wide + wide).all()
