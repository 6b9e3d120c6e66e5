"""In which buffers a gradient leaves the step, and that the shards' parts make it up."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from psrpc.core.placement import make_plan
from psrpc.core.plan import Placement, Plan, VariableSpec
from worker.step.layout import MOST_JOINED, Layout

steady = settings(max_examples=40, derandomize=True)
sizes = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def make(sizes: list[int], shards: int, placement: Placement) -> Plan:
    """Float32 variables, and an arena of state."""
    variables = [VariableSpec(f"v{i}", (n,), "float32", "trainable") for i, n in enumerate(sizes)]
    state = VariableSpec("state", (5,), "float32", "state")
    return make_plan([*variables, state], shards, placement)


@steady
@given(sizes, st.integers(1, 4), st.sampled_from(["cut", "whole"]), st.integers(1, 160))
def test_shards_get_every_element_in_its_place(
    sizes: list[int], shards: int, placement: Placement, alone_nbytes: int
) -> None:
    plan = make(sizes, shards, placement)
    layout = Layout(plan, "plain", alone_nbytes)
    counting = {arena.name: np.arange(arena.length) for arena in plan.arenas}
    gradients = layout.cut([counting[s.arena.name][s.start : s.stop] for s in layout.spans])
    assert len(gradients) == shards
    for arena in plan.arenas:
        for shard, gradient in enumerate(gradients):
            parts = [np.zeros(0, int), *gradient[arena.name].parts]
            expected = counting[arena.name][arena.cuts[shard] : arena.cuts[shard + 1]]
            np.testing.assert_array_equal(np.concatenate(parts), expected)


@steady
@given(sizes, st.integers(1, 160))
def test_large_variables_are_alone_and_neighbours_are_joined(
    sizes: list[int], alone_nbytes: int
) -> None:
    plan = make(sizes, 1, "cut")
    for arena in plan.arenas:
        spans = [s for s in Layout(plan, "plain", alone_nbytes).spans if s.arena is arena]
        assert [i for span in spans for i in span.variables] == list(arena.order)
        large = [
            any(4 * plan.variables[i].size >= alone_nbytes for i in span.variables)
            for span in spans
        ]
        assert all(len(s.variables) == 1 for s, alone in zip(spans, large, strict=True) if alone)
        # Otherwise they would have been joined.
        assert not any(not a and not b for a, b in pairwise(large))


def test_no_more_variables_are_joined_than_tensorflow_compiles_in_time() -> None:
    """TensorFlow's time for one operation grows with the square of its inputs."""
    plan = make([1 + i % 3 for i in range(2 * MOST_JOINED + 5)], 2, "cut")
    arena = next(arena for arena in plan.arenas if arena.role == "trainable")
    spans = [span for span in Layout(plan, "plain").spans if span.arena is arena]
    assert [len(span.variables) for span in spans] == [MOST_JOINED, MOST_JOINED, 5]
    assert [i for span in spans for i in span.variables] == list(arena.order)
    ends = [0, *(span.stop for span in spans)]
    assert [(span.start, span.stop) for span in spans] == list(pairwise(ends))
    assert ends[-1] == sum(plan.variables[i].size for i in arena.order)


def test_only_trainable_float32_is_encoded() -> None:
    variables = [
        VariableSpec("w", (8,), "float32", "trainable"),
        VariableSpec("d", (8,), "float64", "trainable"),
        VariableSpec("m", (8,), "float32", "state"),
    ]
    plan = make_plan(variables, 1, "cut")
    layout = Layout(plan, "float16")
    assert {s.arena.name: s.encoding for s in layout.spans} == {
        "float32.trainable": "float16",
        "float64.trainable": "plain",
        "float32.state": "plain",
    }
    (gradient,) = layout.cut([np.zeros(8) for _ in layout.spans])
    assert {name: encoded.encoding for name, encoded in gradient.items()} == {
        span.arena.name: span.encoding for span in layout.spans
    }
