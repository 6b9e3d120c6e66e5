"""Compression with error feedback: nothing is lost, only late."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrpc.core.encoding import Encoded, Gradient, decode, plain
from psrpc.core.placement import make_plan
from psrpc.core.plan import Plan, VariableSpec
from worker.job.job import Compression
from worker.step.layout import Compressor

NDArray = npt.NDArray[Any]

TRAINABLE, STATE = "float32.trainable", "float32.state"
steady = settings(max_examples=40, derandomize=True)
BOTH = pytest.mark.parametrize("compression", ["topk", "int8"])


def make(size: int, shards: int = 1) -> Plan:
    variables = [
        VariableSpec("w", (size,), "float32", "trainable"),
        VariableSpec("mean", (3,), "float32", "state"),
    ]
    return make_plan(variables, shards, "cut")


def cut(plan: Plan, array: NDArray, pieces: int = 1) -> tuple[Gradient, ...]:
    """``array`` is the trainable arena; each shard's part is left in several pieces."""
    trainable, state = plan.arenas
    return tuple(
        {
            TRAINABLE: Encoded(
                "plain",
                tuple(np.array_split(array[trainable.cuts[k] : trainable.cuts[k + 1]], pieces)),
            ),
            STATE: plain(np.ones(state.shard_length(k), np.float32)),
        }
        for k in range(plan.shards)
    )


def arrived(plan: Plan, gradients: tuple[Gradient, ...]) -> NDArray:
    """The trainable arena as the shards have it."""
    parts = []
    for shard, gradient in enumerate(gradients):
        encoded = gradient[TRAINABLE]
        part = np.empty(plan.arenas[0].shard_length(shard), np.float32)
        if encoded.encoding == "plain":
            np.concatenate(encoded.parts, out=part)
        else:
            (raw,) = encoded.parts
            decode(encoded.encoding, raw, part)
        parts.append(part)
    return np.concatenate(parts)


def whole_numbers(seed: int, size: int) -> NDArray:
    return np.random.default_rng(seed).integers(-50, 50, size).astype(np.float32)


@BOTH
@steady
@given(st.integers(2, 3000), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_everything_arrives_in_the_end(
    compression: Compression, size: int, shards: int, pieces: int, steps: int
) -> None:
    plan = make(size, shards)
    compressor = Compressor(plan, compression, 0.1)
    gradients = [whole_numbers(step, size) for step in range(steps)]
    # Then nothing but what is left: a tenth at a time, or to 1/254 of it.
    nothing = [np.zeros(size, np.float32)] * 20
    pushed = [
        arrived(plan, compressor.compress(cut(plan, gradient, pieces)))
        for gradient in gradients + nothing
    ]
    np.testing.assert_allclose(sum(pushed), sum(gradients), rtol=0, atol=1e-3)


def test_topk_sends_the_largest_first_and_the_rest_in_time() -> None:
    plan = make(10)
    compressor = Compressor(plan, "topk", 0.2)
    gradient = np.arange(10, dtype=np.float32)
    first = arrived(plan, compressor.compress(cut(plan, gradient)))
    assert first.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 8, 9]
    # 7 was left, and counts twice now; so does 6.
    second = arrived(plan, compressor.compress(cut(plan, gradient)))
    assert second.tolist() == [0, 0, 0, 0, 0, 0, 12, 14, 0, 0]


@pytest.mark.parametrize(
    ("size", "topk", "kept"),
    [(1000, 0.01, 10), (1000, 0.0001, 1), (1000, 0.5, 500), (3, 0.5, 1), (149, 0.01, 1)],
)
def test_the_fraction_that_topk_keeps(size: int, topk: float, kept: int) -> None:
    (gradient,) = Compressor(make(size), "topk", topk).compress(
        cut(make(size), whole_numbers(0, size))
    )
    assert gradient[TRAINABLE].nbytes == 8 * kept


@BOTH
def test_each_shard_has_its_own_part_and_tiny_ones_travel_plain(compression: Compression) -> None:
    plan = make(17, 2)
    assert [plan.arenas[0].shard_length(k) for k in range(2)] == [16, 1]
    gradient = whole_numbers(1, 17)
    gradients = Compressor(plan, compression, 0.1).compress(cut(plan, gradient))
    assert [each[TRAINABLE].encoding for each in gradients] == [compression, "plain"]
    assert [each[STATE].encoding for each in gradients] == ["plain", "plain"]
    assert arrived(plan, gradients)[16] == gradient[16]


@BOTH
def test_a_gradient_that_no_shard_used_leaves_no_trace(compression: Compression) -> None:
    plan = make(100, 2)
    one, other = (Compressor(plan, compression, 0.1) for _ in range(2))
    for compressor in (one, other):
        compressor.compress(cut(plan, whole_numbers(0, 100)))
        compressor.settle()
    one.compress(cut(plan, whole_numbers(1, 100)))
    one.settle(unused=range(2))
    # It has come to its end, whatever is said later.
    one.settle(unused=range(2))
    first, second = [
        arrived(plan, c.compress(cut(plan, whole_numbers(2, 100)))) for c in (one, other)
    ]
    np.testing.assert_array_equal(first, second)


@BOTH
def test_a_gradient_that_was_used_is_not_taken_back_later(compression: Compression) -> None:
    plan = make(100, 2)
    one, other = (Compressor(plan, compression, 0.1) for _ in range(2))
    for compressor in (one, other):
        compressor.compress(cut(plan, whole_numbers(0, 100)))
        compressor.settle()
    one.settle(unused=range(2))
    first, second = [
        arrived(plan, c.compress(cut(plan, whole_numbers(1, 100)))) for c in (one, other)
    ]
    np.testing.assert_array_equal(first, second)


@BOTH
@steady
@given(st.integers(4, 200), st.integers(1, 3), st.data())
def test_a_gradient_that_some_shards_did_not_use_counts_once_on_each(
    compression: Compression, size: int, shards: int, data: st.DataObject
) -> None:
    plan = make(size, shards)
    compressor = Compressor(plan, compression, 0.2)
    cuts = plan.arenas[0].cuts
    used = np.zeros(size, np.float32)
    wanted = np.zeros(size, np.float32)
    for step in range(4):
        gradient = whole_numbers(step, size)
        unused = data.draw(st.sets(st.integers(0, shards - 1)))
        sent = arrived(plan, compressor.compress(cut(plan, gradient)))
        compressor.settle(unused)
        for shard in set(range(shards)) - unused:
            part = slice(cuts[shard], cuts[shard + 1])
            used[part] += sent[part]
            wanted[part] += gradient[part]
    for _ in range(20):
        used += arrived(plan, compressor.compress(cut(plan, np.zeros(size, np.float32))))
        compressor.settle()
    np.testing.assert_allclose(used, wanted, rtol=0, atol=1e-3)


@BOTH
def test_the_residual_can_be_dropped(compression: Compression) -> None:
    plan = make(100)
    one, fresh = (Compressor(plan, compression, 0.1) for _ in range(2))
    one.compress(cut(plan, whole_numbers(0, 100)))
    one.forget()
    one.settle(unused=[0])
    first, second = [
        arrived(plan, c.compress(cut(plan, whole_numbers(1, 100)))) for c in (one, fresh)
    ]
    np.testing.assert_array_equal(first, second)


@BOTH
@pytest.mark.parametrize("unused", [(), (0, 1)])
def test_a_sum_that_overflows_is_not_sent_and_changes_nothing(
    compression: Compression, unused: tuple[int, ...]
) -> None:
    plan = make(100, 2)
    one, other = (Compressor(plan, compression, 0.1) for _ in range(2))
    largest = np.full(100, np.finfo(np.float32).max)
    # The same sign everywhere, and too small to be sent beside the largest.
    gradient = np.float32(0.003) * largest
    gradient[::20] = largest[0]
    for compressor in (one, other):
        compressor.compress(cut(plan, gradient))
        compressor.settle()
    assert one.compress(cut(plan, largest)) == ()
    one.settle(unused)
    first, second = [
        arrived(plan, c.compress(cut(plan, whole_numbers(2, 100)))) for c in (one, other)
    ]
    np.testing.assert_array_equal(first, second)
