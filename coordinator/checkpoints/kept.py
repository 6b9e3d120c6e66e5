"""Chooses among the checkpoints of a run: the best, and those that its job keeps."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from coordinator.core.description import JobDescription, read_description
from coordinator.core.retention import Kept, Objective, best_of
from coordinator.records.run_directory import LEDGER
from coordinator.records.store import Store, unreadable_ledger
from psrpc.checkpoint.manifest import Found, Manifest, find_checkpoints
from psrpc.core.document import anything, record
from psrpc.core.errors import CheckpointError, InvalidJob, PsError
from psrpc.core.run_names import CHECKPOINTS, JOB
from psrpc.files.storage import cause_of, read_json


def best_checkpoint(run_dir: Path) -> tuple[Manifest, Objective, float] | None:
    """The best of a run that keeps it, by what, and its result; None where there is none, or the
    run cannot say."""
    objective = objective_of(run_dir)
    if objective is None:
        return None
    try:
        found, scores = run_checkpoints(run_dir), scores_of(run_dir, objective)
    except PsError:
        return None
    best = best_of(as_kept(found), objective, scores)
    for _, manifest in found.manifests:
        if manifest.name == best:
            return manifest, objective, scores[manifest.generation, manifest.global_step]
    return None


def run_checkpoints(run_dir: Path) -> Found:
    if not (run_dir / CHECKPOINTS).is_dir():
        raise CheckpointError(
            f"{run_dir} has no {CHECKPOINTS}/; expected the directory of a run", code="PS404"
        )
    return find_checkpoints(run_dir / CHECKPOINTS)


def as_kept(found: Found) -> list[Kept]:
    return [Kept(m.name, m.generation, m.global_step) for _, m in found.manifests]


def described_job(run_dir: Path) -> JobDescription:
    path = run_dir / JOB
    try:
        kept = record({"description": anything}, more=True)(read_json(path), "")
        return read_description(kept["description"])
    except (OSError, ValueError) as error:
        raise InvalidJob(f"{path} does not say what the job keeps: {cause_of(error)}") from None
    except InvalidJob as error:
        raise InvalidJob(f"{path} does not say what the job keeps: {error}") from None


def objective_of(run_dir: Path) -> Objective | None:
    """By what the run's best checkpoint is chosen; None too where nobody can say."""
    try:
        return described_job(run_dir).keep_best
    except InvalidJob:
        return None


def scores_of(run_dir: Path, objective: Objective | None) -> Mapping[tuple[int, int], float]:
    if objective is None:
        return {}
    store = Store(run_dir / LEDGER)
    try:
        store.open_to_read()
        return store.scores(objective.metric)
    except sqlite3.Error as error:
        raise unreadable_ledger(run_dir / LEDGER, error) from None
    finally:
        store.close()
