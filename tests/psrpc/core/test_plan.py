"""The plan: every element once, cuts even and aligned, whole means whole."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrpc.core.errors import InvalidJob
from psrpc.core.placement import make_plan
from psrpc.core.plan import ALIGNMENT_BYTES, Placement, Plan, VariableSpec, aligned_empty
from psrpc.core.tables import TableSpec

variables = st.lists(
    st.builds(
        lambda shape, dtype, role: (tuple(shape), dtype, role),
        st.lists(st.integers(1, 9), max_size=3),
        st.sampled_from(["float32", "float64"]),
        st.sampled_from(["trainable", "state"]),
    )
    | st.lists(st.integers(1, 9), max_size=3).map(lambda shape: (tuple(shape), "int64", "state")),
    max_size=8,
).map(
    lambda kinds: [
        VariableSpec("first", (7,), "float32", "trainable"),
        *(VariableSpec(f"v{i}", *kind) for i, kind in enumerate(kinds)),
    ]
)


@given(variables, st.integers(1, 5), st.sampled_from(["cut", "whole"]))
def test_every_element_lives_in_one_place(
    specs: list[VariableSpec], shards: int, placement: Placement
) -> None:
    plan = make_plan(specs, shards, placement)
    seen = {v.name: np.zeros(v.size, int) for v in specs}
    for arena in plan.arenas:
        for shard in range(shards):
            filled = 0
            for piece in plan.shard_slices(arena, shard):
                assert piece.offset == filled, "slices fill the shard's part without gaps"
                filled += piece.stop - piece.start
                seen[piece.variable.name][piece.start : piece.stop] += 1
            assert filled == arena.shard_length(shard)
    assert all((count == 1).all() for count in seen.values())
    assert sum(plan.shard_nbytes(k) for k in range(shards)) == sum(
        v.size * np.dtype(v.dtype).itemsize for v in specs
    )


@given(variables, st.integers(1, 5), st.sampled_from(["cut", "whole"]))
def test_json_round_trip_keeps_the_hash(
    specs: list[VariableSpec], shards: int, placement: Placement
) -> None:
    plan = make_plan(specs, shards, placement)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash


def test_cuts_are_even_and_aligned() -> None:
    plan = make_plan([VariableSpec("w", (1000, 333), "float32", "trainable")], 3, "cut")
    (arena,) = plan.arenas
    assert all(cut * 4 % ALIGNMENT_BYTES == 0 for cut in arena.cuts[:-1])
    lengths = [arena.shard_length(k) for k in range(3)]
    assert max(lengths) - min(lengths) <= 2 * ALIGNMENT_BYTES // 4


@pytest.mark.parametrize(("dtype", "unit"), [("float32", 16), ("float64", 8)])
def test_cut_variables_that_fill_units_of_64_bytes_are_aligned(dtype: str, unit: int) -> None:
    sizes = [10, unit, 3 * unit, unit + 1, 1, 7 * unit]
    specs = [VariableSpec(f"v{i}", (n,), dtype, "trainable") for i, n in enumerate(sizes)]
    (arena,) = make_plan(specs, 2, "cut").arenas
    assert arena.order == (1, 2, 5, 0, 3, 4)
    assert [start % unit for start in arena.starts[:4]] == [0] * 4


def test_whole_keeps_variables_whole_and_balances() -> None:
    specs = [VariableSpec(f"v{i}", (100 - i,), "float32", "trainable") for i in range(10)]
    plan = make_plan(specs, 2, "whole")
    for shard in range(2):
        for piece in plan.shard_slices(plan.arenas[0], shard):
            assert (piece.start, piece.stop) == (0, piece.variable.size)
    assert abs(plan.shard_nbytes(0) - plan.shard_nbytes(1)) <= 4 * 100


INTEGERS_TOO = {"w": "float32", "n": "int64"}


def test_another_layout_has_another_hash() -> None:
    specs = [VariableSpec("w", (64,), "float32", "trainable")]
    hashes = {make_plan(specs, shards, "cut").hash for shards in (1, 2, 3)}
    assert len(hashes) == 3


SGD = {"class_name": "SGD", "config": {"learning_rate": 0.1}}
ZERO = {"class_name": "constant", "config": {"value": 0.0}}
TABLE = TableSpec("t", 2, None, ZERO, SGD)


@pytest.mark.parametrize("placement", ["cut", "whole"])
def test_slices_have_all_arenas_and_no_rows(placement: Placement) -> None:
    specs = [VariableSpec(f"v{i}", (100 + i,), "float32", "trainable") for i in range(4)]
    plan = make_plan(specs, 5, placement, [TABLE], 2)
    alone = make_plan(specs, 2, placement)
    assert plan.row_shards == 3
    assert [plan.tables_on(shard) for shard in range(5)] == [(TABLE,)] * 3 + [()] * 2
    (arena,), (expected,) = plan.arenas, alone.arenas
    assert arena.cuts == (0, 0, 0, *expected.cuts)
    assert (arena.order, arena.starts) == (expected.order, expected.starts)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.hash != make_plan(specs, 5, placement, [TABLE]).hash
    # Plans of before have no such key, and keep their hash.
    assert b"slices" not in alone.to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slices": 3}, "of its 3 shards 3 are slices"),
        ({"slices": 4}, "of its 3 shards 4 are slices"),
        ({"slices": 2}, "has elements on shards that have rows only"),
        ({"slices": -1}, "slices is -1"),
    ],
)
def test_a_plan_with_impossible_slices_is_refused(change: dict[str, int], message: str) -> None:
    specs = [VariableSpec("w", (64,), "float32", "trainable")]
    plan = json.loads(make_plan(specs, 3, "cut", [TABLE]).to_json()) | change
    with pytest.raises(InvalidJob, match=message):
        Plan.from_json(json.dumps(plan).encode())
    with pytest.raises(InvalidJob, match="slices is 3; expected fewer than the 3 shards"):
        make_plan(specs, 3, "cut", [TABLE], 3)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "no trainable variables"),
        ([VariableSpec("m", (2,), "float32", "state")], "no trainable variables"),
        ([VariableSpec("w", (2,), "int32", "trainable")], "'w' has dtype int32"),
        (
            [VariableSpec(name, (2,), dtype, "trainable") for name, dtype in INTEGERS_TOO.items()],
            "'n' is trainable and int64",
        ),
        ([VariableSpec("w", (2,), "float32", "trainable")] * 2, "2 variables are named 'w'"),
    ],
)
def test_variables_that_cannot_be_laid_out_are_refused(
    specs: list[VariableSpec], message: str
) -> None:
    with pytest.raises(InvalidJob, match=message):
        make_plan(specs, 1, "cut")


def test_only_a_table_that_keeps_evicted_rows_says_so() -> None:
    # Plans of before have no such key, and keep their hash.
    zero = {"class_name": "constant", "config": {"value": 0.0}}
    sgd = {"class_name": "SGD", "config": {"learning_rate": 0.1}}
    plain = TableSpec("t", 2, None, zero, sgd, max_rows=9, eviction="age")
    plans = [make_plan([], 1, "cut", [replace(plain, keep_evicted=k)]) for k in (False, True)]
    assert [b"keep_evicted" in plan.to_json() for plan in plans] == [False, True]
    assert [Plan.from_json(plan.to_json()) for plan in plans] == plans
    with pytest.raises(InvalidJob, match="'t' keeps evicted rows, but evicts none"):
        make_plan([], 1, "cut", [replace(plain, eviction=None, keep_evicted=True)])


@given(st.integers(1, 100))
def test_aligned_empty_is_aligned(length: int) -> None:
    array = aligned_empty(length, "float32")
    assert array.shape == (length,)
    assert array.ctypes.data % ALIGNMENT_BYTES == 0
