"""Checkpoints of known values, written and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from psrpc.checkpoint.checkpoint import ShardState
from psrpc.core.placement import make_plan
from psrpc.core.plan import Placement, Plan, VariableSpec
from tests.psrpc.manifests import write_and_commit

VARIABLES = (
    VariableSpec("dense/kernel", (7, 9), "float32", "trainable"),
    VariableSpec("dense/bias", (40,), "float32", "trainable"),
    VariableSpec("scale", (), "float32", "trainable"),
    VariableSpec("exact", (20,), "float64", "trainable"),
    VariableSpec("norm/mean", (21,), "float32", "state"),
)
VALUES = {
    v.name: np.arange(v.size, dtype=v.dtype).reshape(v.shape) + 1000 * i
    for i, v in enumerate(VARIABLES)
}


def plan_of(shards: int, placement: Placement = "cut") -> Plan:
    return make_plan(VARIABLES, shards, placement)


def state_of(plan: Plan, shard: int, version: int = 3, applied: Any = ()) -> ShardState:
    """The shard's part of VALUES; slot ``momentum`` holds their negatives."""
    values = {}
    for arena in plan.arenas:
        whole = np.concatenate([VALUES[plan.variables[i].name].ravel() for i in arena.order])
        values[arena.name] = whole[arena.cuts[shard] : arena.cuts[shard + 1]]
    elements = {a.name: -values[a.name] for a in plan.arenas if a.role == "trainable"}
    return ShardState(
        values=values,
        elements={"momentum": {name: array for name, array in elements.items() if array.size}},
        scalars={"iterations": np.asarray(version, "int64")},
        version=version,
        applied=applied,
    )


def write(root: Path, plan: Plan, step: int = 5, generation: int = 1, states: Any = None) -> Path:
    """A committed checkpoint."""
    temporary = root / f".tmp-{step}"
    temporary.mkdir(parents=True)
    states = states or [state_of(plan, shard) for shard in range(plan.shards)]
    return write_and_commit(temporary, plan, states, step, generation=generation)


def assert_state(found: ShardState, expected: ShardState) -> None:
    assert found.values.keys() == expected.values.keys()
    for name, array in expected.values.items():
        np.testing.assert_array_equal(found.values[name], array)
        assert found.values[name].dtype == array.dtype
        assert not array.size or found.values[name].ctypes.data % 64 == 0
        assert found.values[name].flags.writeable
    for name, array in expected.elements["momentum"].items():
        np.testing.assert_array_equal(found.elements["momentum"][name], array)
    assert found.scalars["iterations"] == expected.scalars["iterations"]
    assert found.scalars["iterations"].dtype == np.int64
