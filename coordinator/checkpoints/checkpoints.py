"""The coordinator's part of checkpoints on disk: directories, manifests, removal."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from coordinator.checkpoints.pruning import Pruner
from coordinator.checkpoints.snapshots import Taken
from coordinator.core.run import Run
from psrpc.checkpoint.checkpoint import Manifest, ManifestFile, commit
from psrpc.checkpoint.manifest import TEMPORARY
from psrpc.core.commands import SnapshotOrder
from psrpc.core.errors import CheckpointError, disk_code
from psrpc.core.names import CHECKPOINTS
from psrpc.files.durable import give_names_back, make_directory
from psrpc.files.storage import DISK, Storage

RESERVE_NBYTES = 64 << 10
"""Space that a checkpoint leaves free: on a full disk decisions cannot be stored, and the job
ends."""

WRITTEN_UTC = "written_utc"
"""Key in a manifest's details."""


class Checkpoints:
    """Makes the directories of one run's checkpoints, commits them and removes old ones. All
    methods block on the disk; any thread may call them, one at a time."""

    def __init__(self, run: Run, storage: Storage = DISK) -> None:
        self._run = run
        self._storage = storage
        self._directory = run.run_dir / CHECKPOINTS
        plan = run.plan
        self._nbytes = sum(plan.shard_nbytes(shard) for shard in range(plan.shards))
        """Estimated size of a checkpoint."""
        keep, best = run.description.keep_checkpoints, run.description.keep_best
        self.gone = False
        """Whether the run directory was missing at the last attempt to make a checkpoint."""
        self._pruner = Pruner(self._directory, keep, best, storage)
        self.lasting = self._pruner.lasting
        """Checkpoint names that this process has made durable and must not reuse, since shards may
        be reading them."""

    def prepare(self, order: SnapshotOrder) -> None:
        """Makes the directory that shards write to, before the order goes out.

        Raises:
            CheckpointError: the operating system refused, or the disk is too full.
        """
        directory = self._run.run_dir / order.directory
        try:
            free = self._free()
            if free < self._nbytes + RESERVE_NBYTES:
                raise CheckpointError(
                    f"no space for {directory}: {free} bytes are free; a checkpoint takes about "
                    f"{self._nbytes} and leaves {RESERVE_NBYTES} to the ledger",
                    code="PS502",
                )
            make_directory(directory, self._storage)
        except OSError as error:
            raise CheckpointError(
                f"cannot make {directory}: {error.strerror}", code=disk_code(error)
            ) from error

    def _free(self) -> int:
        run_dir = self._run.run_dir
        try:
            free = self._storage.free(run_dir)
        except FileNotFoundError:
            self.gone = True
            raise CheckpointError(
                f"run directory {run_dir} is gone, it was deleted or its file system unmounted: "
                "nothing of the run is saved there any more; training goes on, and checkpoints are "
                "written again once the directory is mounted or made anew",
                code="PS504",
            ) from None
        self.gone = False
        return free

    def commit(self, taken: Taken, generation: int | None = None) -> None:
        """Writes the manifest and renames the directory. ``generation`` is that of the order; None
        means the run's.

        Raises:
            CheckpointError: it cannot be committed.
        """
        run, order, description = self._run, taken.order, self._run.description
        under = taken.under or run.followed[-1]
        manifest = Manifest(
            run_id=run.run_id,
            name=order.name,
            global_step=order.global_step,
            generation=run.generation if generation is None else generation,
            policy=under.number,
            mode=under.settings.mode,
            replicas=under.settings.open,
            plan=run.plan,
            optimizer=description.optimizer,
            engine=description.engine,
            seed=description.seed,
            batch_size=description.unit,
            data_fingerprint=description.data_fingerprint,
            job=description.name,
            job_sha256=description.job_sha256,
            files=tuple(
                ManifestFile(f.shard, f.file, f.nbytes, f.sha256, f.version, f.rows, f.evicted)
                for f in taken.files
            ),
            details={
                "train_records": description.train_records,
                "epochs": description.epochs,
                "settings": under.settings.to_json(),
                "rate": under.rate,
                "overrides": list(run.overrides),
                WRITTEN_UTC: datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )
        commit(run.run_dir / order.directory, self._directory / order.name, manifest, self._storage)
        self.lasting.add(order.name)
        # Tables may have many files of rows. The next checkpoint reuses most of them and writes
        # one, which is not much larger than the largest of them.
        self._nbytes = sum(
            file.nbytes + max((part.nbytes for part in file.rows), default=0)
            for file in taken.files
        )

    def is_damaged(self, name: str) -> bool:
        """Whether a checkpoint has been read back and found not to be good."""
        return self._pruner.is_damaged(name)

    def discard(self, order: SnapshotOrder) -> None:
        """Removes the files of a failed checkpoint as far as possible."""
        if order.directory:
            with suppress(OSError):
                self._storage.remove(self._run.run_dir / order.directory)

    def retain(
        self, scores: Mapping[tuple[int, int], float], in_use: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Removes superfluous checkpoints once the newest has been read back and found good;
        returns warnings.

        Args:
            scores: the results that ``keep_best`` compares, by generation and global step.
            in_use: names of checkpoints that are still to be evaluated or restored.
        """
        return self._pruner.prune(scores, in_use)


def remove_unfinished(run_dir: Path, storage: Storage = DISK) -> None:
    """Removes checkpoints that a killed coordinator had begun to write or remove, and gives their
    names back to those that it had renamed."""
    with suppress(OSError):
        give_names_back(run_dir / CHECKPOINTS, storage)
    for name in storage.directories(run_dir / CHECKPOINTS):
        if name.startswith(TEMPORARY):
            with suppress(OSError):
                storage.remove(run_dir / CHECKPOINTS / name)
