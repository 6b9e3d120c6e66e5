"""Checkpoints on the disk, as the coordinator sees them: directories, manifests, the choice."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.description import JobDescription
from coordinator.run import Restored, Run
from coordinator.saving import CHECKPOINTS, temporary_directory
from coordinator.snapshots import Taken
from coordinator.work import SnapshotOrder
from psrpc.checkpoint import Manifest, ManifestFile, commit, newest_good
from psrpc.errors import CheckpointError, InvalidJob
from psrpc.shard_file import fsync_directory


class Checkpoints:
    """Makes the directories of one run's checkpoints and commits them."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def prepare(self, order: SnapshotOrder) -> None:
        """Makes the directory that shards write to, before the order goes out.

        Raises:
            CheckpointError: the operating system refused.
        """
        directory = self._run.run_dir / order.directory
        try:
            if directory.exists():
                shutil.rmtree(directory)  # left by a run that was killed
            directory.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"cannot make {directory}: {error.strerror}") from error

    def commit(self, taken: Taken) -> None:
        """Writes the manifest and gives the directory its name. Blocks on the disk; may be
        called on a thread.

        Raises:
            CheckpointError: it cannot be committed.
        """
        run, order, description = self._run, taken.order, self._run.description
        final = run.run_dir / CHECKPOINTS / order.name
        if final.exists():
            # An earlier generation came as far and was not chosen when this one went on from an
            # older checkpoint, so what is there is damaged.
            shutil.rmtree(final)
        manifest = Manifest(
            run_id=run.run_id,
            name=order.name,
            global_step=order.global_step,
            generation=run.generation,
            policy=run.policy,
            mode=description.mode,
            replicas=description.replicas,
            plan=run.plan,
            optimizer=description.optimizer,
            engine=description.engine,
            seed=description.seed,
            batch_size=description.batch_size,
            data_fingerprint=description.data_fingerprint,
            job=description.name,
            job_sha256=description.job_sha256,
            files=tuple(
                ManifestFile(f.shard, f.file, f.nbytes, f.sha256, f.version) for f in taken.files
            ),
            details={
                "train_records": description.train_records,
                "epochs": description.epochs,
                "overrides": list(run.overrides),
            },
        )
        commit(run.run_dir / order.directory, final, manifest)
        # The first checkpoint made the directory of all of them.
        fsync_directory(run.run_dir)

    def discard(self, order: SnapshotOrder) -> None:
        """Removes what shards wrote of a checkpoint that failed."""
        if order.directory:
            shutil.rmtree(self._run.run_dir / order.directory, ignore_errors=True)


@dataclass(frozen=True)
class Chosen:
    """The checkpoint to go on from, the run that it is of, and lines on what was passed over."""

    restored: Restored
    run_id: str
    generation: int
    remarks: tuple[str, ...]


def choose_checkpoint(run_dir: Path, description: JobDescription) -> Chosen:
    """The newest good checkpoint of a run, which must fit the job.

    Raises:
        CheckpointError: there is none.
        InvalidJob: it is of a job that differs in what training depends on; names both values.
    """
    try:
        choice = newest_good(run_dir / CHECKPOINTS)
    except CheckpointError as error:
        raise CheckpointError(
            f"cannot resume: {error}; start again with another --run-dir"
        ) from None
    manifest = choice.manifest
    _check_fits(choice.directory, manifest, description)
    remarks = [f"passed over {path.name}: {reason}" for path, reason in choice.refused]
    if manifest.job_sha256 != description.job_sha256:
        remarks.append("the job file has changed since the checkpoint was written")
    if manifest.global_step > description.total_updates:
        raise InvalidJob(
            f"cannot resume from {choice.directory}: it is of step {manifest.global_step}, and "
            f"the job ends at step {description.total_updates} ({description.epochs} epochs); "
            "set epochs back, or start a new run"
        )
    restored = Restored(choice.directory.name, manifest.global_step)
    return Chosen(restored, manifest.run_id, manifest.generation, tuple(remarks))


def remove_unfinished(run_dir: Path) -> None:
    """Removes what a run that was killed had begun to write."""
    for directory in run_dir.glob(temporary_directory("*")):
        shutil.rmtree(directory, ignore_errors=True)


def _check_fits(directory: Path, manifest: Manifest, description: JobDescription) -> None:
    wanted: Sequence[tuple[str, object, object]] = (
        ("data", manifest.data_fingerprint, description.data_fingerprint),
        ("batch_size", manifest.batch_size, description.batch_size),
        ("seed", manifest.seed, description.seed),
        ("mode", manifest.mode, description.mode),
        ("replicas", manifest.replicas, description.replicas),
    )
    for name, theirs, ours in wanted:
        if theirs != ours:
            raise InvalidJob(
                f"cannot resume from {directory}: its {name} is {theirs!r}, the job's is "
                f"{ours!r}; batches would be lost or repeated. Set it back, or start a new run"
            )
