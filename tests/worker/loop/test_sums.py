"""Sums of a worker's gradients of a round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest

from pserver.client.requests import GradientPush
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt
from psrpc.core.encoding import Encoded, Gradient, plain, round_to
from psrpc.core.placement import make_plan
from psrpc.core.plan import Plan, VariableSpec
from psrpc.core.tables import Rows
from tests.worker.fakes import FakeResult
from tests.worker.scripted_coordinator import attempt_at
from worker.loop import sums
from worker.loop.sums import RoundSum
from worker.protocol.actions import Push

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


FIRST, SECOND, THIRD = BatchId(0, 0, 8), BatchId(0, 8, 8), BatchId(0, 16, 2)


def added(
    results: Mapping[BatchId, FakeResult], plan: Plan = PLAN, into: RoundSum | None = None
) -> RoundSum:
    total = into or RoundSum()
    for batch, result in results.items():
        total.add(plan, batch, result, (float(batch.first),), None)
    return total


def pushed(total: RoundSum, *batches: BatchId, plan: Plan = PLAN) -> GradientPush | None:
    """Under ``batches``, the first of which holds it."""
    first, *others = [attempt_at(batch, 1 + batch.first) for batch in batches]
    action = Push(batches[0], first.attempt, grant=b"first", ahead=True, summed=tuple(others))
    made = total.pushes(plan, action, [4] * plan.shards)
    return None if made is None else made[0]


def values_of(push: GradientPush | None) -> list[list[float]]:
    assert push is not None
    assert push.gradients is not None
    return [joined(push.gradients[arena.name]) for arena in PLAN.arenas]


@pytest.mark.parametrize("order", [(FIRST, SECOND, THIRD), (THIRD, FIRST, SECOND)], ids=str)
def test_the_mean_is_weighted_by_records_and_integers_are_of_the_highest_batch(
    order: tuple[BatchId, ...],
) -> None:
    values = {FIRST: (1, 10, 100), SECOND: (2, 20, 200), THIRD: (30, 300, 3000)}
    results = {batch: FakeResult((gradient_of(*values[batch]),)) for batch in order}
    push = pushed(added(results), THIRD, FIRST, SECOND)
    assert push is not None
    mean = (8 * 1 + 8 * 2 + 2 * 30) / 18
    expected = {False: (mean, 10 * mean), True: (3000.0,)}
    for arena, found in zip(PLAN.arenas, values_of(push), strict=True):
        assert any(np.allclose(found, one, rtol=1e-6) for one in expected[arena.replaced])
    assert (push.batch, push.attempt, push.base_version, push.grant) == (THIRD, 17, 4, b"first")
    assert push.totals == (16.0,)
    assert [(one.attempt, one.totals) for one in push.summed] == [
        (Attempt(FIRST, 1), (0.0,)),
        (Attempt(SECOND, 9), (8.0,)),
    ]
    # Another shard keeps no totals.
    two = make_plan((VariableSpec("w", (32,), "float32", "trainable"),), 2, "cut")
    halves = {"float32.trainable": plain(np.ones(16, np.float32))}
    total = added({FIRST: FakeResult((halves, halves)), THIRD: FakeResult((halves, halves))}, two)
    action = Push(FIRST, 1, ahead=True, summed=(attempt_at(THIRD, 2),))
    _, second = total.pushes(two, action, [4, 4]) or []
    assert (second.totals, second.summed[0].totals) == ((), ())


def test_a_sum_is_a_copy_and_the_next_one_begins_anew() -> None:
    gradient = gradient_of(1, 1, 1)
    total = added({FIRST: FakeResult((gradient,)), SECOND: FakeResult((gradient_of(3, 3, 3),))})
    for encoded in gradient.values():
        for part in encoded.parts:
            part[...] = 77
    assert SECOND in total
    assert values_of(pushed(total, SECOND, FIRST))[0][0] == 2.0
    total.clear()
    assert SECOND not in total
    added({THIRD: FakeResult((gradient_of(5, 5, 5),))}, into=total)
    assert values_of(pushed(total, THIRD))[0][0] == 5.0


def test_a_sum_that_is_infinite_is_not_pushed() -> None:
    most = gradient_of(float(np.finfo(np.float32).max), 0, 0)
    assert (
        pushed(added({FIRST: FakeResult((most,)), SECOND: FakeResult((most,))}), FIRST, SECOND)
        is None
    )


@pytest.mark.parametrize("encoding", ["bfloat16", "float16"])
def test_rounded_gradients_of_a_round_are_added_in_float32(
    encoding: Literal["bfloat16", "float16"],
) -> None:
    """TensorFlow hands them over as whole numbers of 16 bits."""
    values: npt.NDArray[np.float32] = np.array([1, 3e-3, 500], np.float32)
    rounded = round_to(values, encoding)
    gradient = {
        **gradient_of(0, 0, 0),
        PLAN.arenas[0].name: Encoded(encoding, (rounded.view(np.uint16),)),
    }
    results = {batch: FakeResult((gradient,)) for batch in (FIRST, SECOND, THIRD)}
    push = pushed(added(results), THIRD, FIRST, SECOND)
    assert push is not None
    assert push.gradients is not None
    (part,) = push.gradients[PLAN.arenas[0].name].parts
    np.testing.assert_allclose(part.astype(np.float32), rounded.astype(np.float32), rtol=1e-2)


def test_rows_are_added_by_id_and_too_many_are_not_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    def result(ids: list[int], value: float) -> FakeResult:
        rows = Rows(np.array(ids, np.int64), np.full((len(ids), 2), value, np.float32))
        return FakeResult((gradient_of(0, 0, 0),), rows=({0: rows},))

    results = {FIRST: result([1, 5], 1.0), THIRD: result([5, 7], 6.0)}
    push = pushed(added(results), THIRD, FIRST)
    assert push is not None
    assert push.rows is not None
    rows = push.rows[0]
    assert rows.ids.tolist() == [1, 5, 7]
    np.testing.assert_allclose(rows.values[:, 0], [0.8, 0.8 + 1.2, 1.2])
    assert results[FIRST].rows[0][0].values[0, 0] == 1.0
    monkeypatch.setattr(sums, "MAX_IDS", 2)
    assert pushed(added(results), THIRD, FIRST) is None
