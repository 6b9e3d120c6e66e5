"""Checkpoints of any plan: their manifests, and the files of their shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from psrpc.checkpoint.checkpoint import (
    Manifest,
    ManifestFile,
    RowsFileEntry,
    ShardState,
    commit,
    shard_file_name,
    write_shard_file,
)
from psrpc.core.plan import Plan
from psrpc.files.storage import DISK, Storage

RUN = "run-1"


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
