"""Checkpoints of known values, written and compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from psrpc.checkpoint.checkpoint import (
    ManifestFile,
    ShardState,
    commit,
    shard_file_name,
    write_shard_file,
)
from psrpc.core.placement import make_plan
from psrpc.core.plan import Placement, Plan, VariableSpec
from tests.psrpc.manifests import manifest_of

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
    files = []
    for shard in range(plan.shards):
        path = temporary / shard_file_name(shard, plan.shards)
        state = states[shard] if states else state_of(plan, shard)
        written = write_shard_file(
            path, plan, shard, state, run_id="run-1", generation=generation, global_step=step
        )
        files.append(
            ManifestFile(shard, written.name, written.nbytes, written.sha256, state.version)
        )
    manifest = replace(manifest_of(plan, tuple(files), step), generation=generation)
    commit(temporary, root / manifest.name, manifest)
    return root / manifest.name


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
