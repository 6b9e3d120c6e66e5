"""Manifests of checkpoints, for a plan and its files."""

from __future__ import annotations

from collections.abc import Sequence

from psrpc.checkpoint.checkpoint import Manifest, ManifestFile
from psrpc.core.plan import Plan

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
