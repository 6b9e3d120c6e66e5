"""Removes checkpoints that are not to be kept, none before a newer one has been read back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from coordinator.checkpoints.evicted import keep_evicted
from coordinator.core.retention import Kept, Objective, superfluous
from psrpc.checkpoint.manifest import Found, find_checkpoints, remove_checkpoint, verify
from psrpc.core.errors import CheckpointError
from psrpc.files.durable import make_last
from psrpc.files.storage import DISK, Storage


@dataclass(frozen=True)
class Removable:
    """Names of checkpoints that may go, oldest first, and what was found to be wrong. ``good`` is
    the newest that was read back, and has to last before any of them goes."""

    names: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    good: str = ""


class Pruner:
    """The checkpoints of one run. Not thread-safe."""

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
        """Those whose name this process has made to last."""
        self._damaged: set[str] = set()

    def find(
        self, scores: Mapping[tuple[int, int], float], in_use: Collection[str] = ()
    ) -> Removable:
        """What :meth:`prune` would remove. Reads the newest checkpoint back, once."""
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
            [Kept(m.name, m.generation, m.global_step) for _, m in found.manifests],
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
        """Removes what may go; returns warnings.

        Args:
            scores: the objective's results, by generation and global step.
            in_use: names of checkpoints that are still to be evaluated or restored.
        """
        removable = self.find(scores, in_use)
        return (*removable.warnings, *self.remove(removable))

    def remove(self, removable: Removable) -> list[str]:
        """Removes what :meth:`find` has found, once the newest good checkpoint lasts; returns
        warnings. The rows that they say were evicted are kept."""
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

    def _verify_newest(self, found: Found) -> list[str]:
        """Goes back to a checkpoint that is good; returns what is wrong with those before."""
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
