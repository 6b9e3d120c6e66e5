"""Removes superfluous checkpoints, none before a newer one has been read back."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from coordinator.checkpoints.evicted import keep_evicted
from coordinator.core.description import JobDescription
from coordinator.core.description_reader import read_description
from coordinator.core.retention import KeptCheckpoint, Objective, best_of, superfluous
from coordinator.records.ledger_file import unreadable_ledger
from coordinator.records.run_directory import LEDGER
from coordinator.records.store import Store
from psrpc.checkpoint.choice import FoundCheckpoints, find_checkpoints
from psrpc.checkpoint.directory import remove_checkpoint, verify
from psrpc.checkpoint.manifest import Manifest
from psrpc.core.document import anything, record
from psrpc.core.errors import CheckpointError, InvalidJob, PsError
from psrpc.core.names import CHECKPOINTS, JOB
from psrpc.files.durable import make_last
from psrpc.files.storage import DISK, Storage, cause_of, read_json


@dataclass(frozen=True)
class Removable:
    """Removable checkpoints, oldest first, and warnings. ``good`` is the newest that was read back;
    its name must be durable before any is removed."""

    names: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    good: str = ""


class Pruner:
    """Prunes the checkpoints of one run. Not thread-safe."""

    def __init__(
        self, checkpoints: Path, keep: int, objective: Objective | None, storage: Storage = DISK
    ) -> None:
        """``keep`` and ``objective`` are as in :func:`coordinator.core.retention.superfluous`."""
        self._checkpoints = checkpoints
        self._keep = keep
        self._objective = objective
        self._storage = storage
        self._verified: set[str] = set()
        self.lasting: set[str] = set()
        """Checkpoints whose name this process has made durable."""
        self._damaged: set[str] = set()

    def find(
        self, scores: Mapping[tuple[int, int], float], in_use: Collection[str] = ()
    ) -> Removable:
        """Finds the checkpoints that :meth:`prune` would remove. Reads each checkpoint back once,
        while it is the newest."""
        try:
            found = find_checkpoints(self._checkpoints, self._storage)
        except CheckpointError as error:
            return Removable(warnings=(str(error),))
        if len(found.manifests) <= self._keep:
            return Removable()
        warnings = self._verify_newest(found)
        names = (manifest.name for _, manifest in found.manifests)
        good = next((name for name in names if name in self._verified), "")
        if not good:
            return Removable(warnings=(*warnings, "no checkpoint is good, and none is removed"))
        going = superfluous(
            as_kept(found),
            self._keep,
            self._objective,
            scores,
            damaged=self._damaged,
            in_use=in_use,
        )
        return Removable(going, tuple(warnings), good)

    def is_damaged(self, name: str) -> bool:
        """Whether a checkpoint has been read back and found not to be good."""
        return name in self._damaged

    def prune(
        self, scores: Mapping[tuple[int, int], float], in_use: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Removes superfluous checkpoints; returns warnings.

        Args:
            scores: the objective's results, by generation and global step.
            in_use: names of checkpoints that are still to be evaluated or restored.
        """
        removable = self.find(scores, in_use)
        return (*removable.warnings, *self.remove(removable))

    def remove(self, removable: Removable) -> list[str]:
        """Removes the checkpoints that :meth:`find` returned, once the name of the newest good
        checkpoint is durable; returns warnings. Keeps their evicted rows."""
        if removable.names and removable.good not in self.lasting:
            good = self._checkpoints / removable.good
            try:
                make_last(good, self._storage)
            except OSError as error:
                return [f"old checkpoints stay: a power cut may take {good}: {error.strerror}"]
            self.lasting.add(removable.good)
        warnings = []
        for name in removable.names:
            try:
                keep_evicted(self._checkpoints / name, self._storage)
                remove_checkpoint(self._checkpoints / name, self._storage)
            except CheckpointError as error:
                warnings.append(str(error))
        return warnings

    def _verify_newest(self, found: FoundCheckpoints) -> list[str]:
        """Verifies checkpoints from the newest back to a good one; returns a warning on each bad
        one."""
        warnings = []
        for directory, manifest in found.manifests:
            if manifest.name in self._verified:
                break
            if manifest.name in self._damaged:
                continue
            try:
                verify(directory, manifest, self._storage)
            except CheckpointError as error:
                self._damaged.add(manifest.name)
                warnings.append(f"a checkpoint is damaged: {error}")
            else:
                self._verified.add(manifest.name)
                break
        return warnings


def best_checkpoint(run_dir: Path) -> tuple[Manifest, Objective, float] | None:
    """Returns the best checkpoint of a run that keeps it, the objective and its result; None if
    there is none, or it cannot be determined."""
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


def run_checkpoints(run_dir: Path) -> FoundCheckpoints:
    if not (run_dir / CHECKPOINTS).is_dir():
        raise CheckpointError(
            f"{run_dir} has no {CHECKPOINTS}/; expected the directory of a run", code="PS404"
        )
    return find_checkpoints(run_dir / CHECKPOINTS)


def as_kept(found: FoundCheckpoints) -> list[KeptCheckpoint]:
    return [KeptCheckpoint(m.name, m.generation, m.global_step) for _, m in found.manifests]


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
    """Returns the objective by which the run keeps its best checkpoint; None if it keeps none, or
    if that is unknown."""
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
