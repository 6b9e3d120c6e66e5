"""Checkpoints: of any plan and states, and of known values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from psrpc.checkpoint.checkpoint import (
    Manifest,
    ManifestFile,
    ShardState,
    commit,
    shard_file_name,
    write_shard_file,
)
from psrpc.core.placement import make_plan
from psrpc.core.plan import Placement, Plan, VariableSpec
from psrpc.core.shard_reports import RowsFileEntry
from psrpc.files.storage import DISK, Storage

RUN = "run-1"

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


def manifest_of(
    plan: Plan, files: Sequence[ManifestFile], step: int = 5, run: str = RUN
) -> Manifest:
    return Manifest(
        run_id=run,
        name=f"step-{step:08d}",
        global_step=step,
        generation=1,
        policy=1,
        mode="async",
        replicas=0,
        plan=plan,
        optimizer={"class_name": "SGD", "config": {"learning_rate": 0.1}},
        engine="numpy",
        seed=0,
        batch_size=10,
        data_fingerprint="abc",
        job="job",
        job_sha256="00",
        files=tuple(files),
    )


def write_and_commit(
    temporary: Path,
    plan: Plan,
    states: Sequence[ShardState],
    step: int = 5,
    *,
    generation: int = 1,
    run: str = RUN,
    storage: Storage = DISK,
    rows_of: Callable[[int], Sequence[RowsFileEntry]] = lambda _shard: (),
) -> Path:
    """The checkpoint of ``states``, one of each shard. It is written in ``temporary``, which is
    there, and committed beside it. ``rows_of`` writes a shard's rows."""
    files = []
    for shard, state in enumerate(states):
        written = write_shard_file(
            temporary / shard_file_name(shard, plan.shards),
            plan,
            shard,
            state,
            run_id=run,
            generation=generation,
            global_step=step,
            storage=storage,
        )
        rows = tuple(rows_of(shard))
        files.append(
            ManifestFile(shard, written.name, written.nbytes, written.sha256, state.version, rows)
        )
    manifest = replace(manifest_of(plan, files, step, run), generation=generation)
    commit(temporary, temporary.parent / manifest.name, manifest, storage)
    return temporary.parent / manifest.name


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
