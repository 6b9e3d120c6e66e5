"""Chooses the checkpoint that a generation restores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSet, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.core.applied import common_positions, partial_positions
from coordinator.core.description import JobDescription
from coordinator.core.run import RestoredCheckpoint, Run
from coordinator.schedule.open_batches import count_batches
from psrpc.checkpoint.checkpoint import (
    Choice,
    Manifest,
    applied_sets,
    newest_good,
    read_manifest,
    slot_names,
)
from psrpc.checkpoint.load import compare_variables
from psrpc.checkpoint.manifest import check_identity
from psrpc.checkpoint.rows_chain import compare_tables
from psrpc.core.errors import CheckpointError, InvalidJob
from psrpc.core.intervals import IntervalSet
from psrpc.core.names import CHECKPOINTS
from psrpc.core.plan import Plan
from psrpc.core.text import counted
from psrpc.files.durable import give_names_back, make_last
from psrpc.files.storage import DISK, Storage


@dataclass(frozen=True)
class Chosen:
    """The checkpoint to go on from, its run, remarks on skipped ones, and the number of batches
    that all of its shards have. ``apart`` is the number of batches that only some shards had; since
    the plan has changed, they count twice on parts of the parameters."""

    restored: RestoredCheckpoint
    run_id: str
    generation: int
    remarks: tuple[str, ...]
    batches: int = 0
    apart: int = 0

    def version(self, policy: int) -> int | None:
        """Returns the version that shards take on when they restore it under the policy of that
        number; None for its own, which under another policy may not have counted global steps."""
        return None if self.restored.policy == policy else self.restored.global_step


def choose_checkpoint(
    run_dir: Path,
    description: JobDescription,
    run_id: str | None = None,
    refused: Mapping[str, str] | None = None,
    storage: Storage = DISK,
    plan: Plan | None = None,
    lasting: MutableSet[str] | None = None,
) -> Chosen:
    """Returns the newest good checkpoint of a run, which must fit the job, and makes its name
    durable, since later training depends on it.

    Args:
        run_id: the run that it must belong to; None accepts any.
        refused: names of unusable checkpoints, and why.
        plan: the plan of the shards that load it; None if it does not matter.
        lasting: names that this process has made durable; the chosen one is added.

    Raises:
        CheckpointError: there is none.
        InvalidJob: it belongs to a job that differs in something that training depends on; the
            message names both values.
        OSError: the operating system refused; a retry may help.
    """
    give_names_back(run_dir / CHECKPOINTS, storage)
    try:
        choice = newest_good(run_dir / CHECKPOINTS, run_id, refused, storage)
    except CheckpointError as error:
        raise CheckpointError(
            f"cannot resume: {error}; start again with another --run-dir", code=error.code
        ) from None
    manifest = choice.manifest
    _check_fits(choice.directory, manifest, description)
    _check_slots(choice.directory, manifest, description, storage)
    remarks = [f"passed over {path.name}: {reason}" for path, reason in choice.refused]
    if manifest.job_sha256 != description.job_sha256:
        remarks.append("the job file has changed since the checkpoint was written")
    sets = _applied(choice, storage)
    last = max((epoch for one in sets for epoch, held in one.items() if len(held)), default=0)
    if last >= description.epochs:
        raise InvalidJob(
            f"cannot resume from {choice.directory}: it has batches of epoch {last + 1}, and the "
            f"job has {description.epochs}; say --set epochs={last + 1} or more, or start a new "
            "run",
            code="PS405",
        )
    apart = 0
    if plan is not None and manifest.plan.hash != plan.hash:
        apart = _batches(sets, manifest.batch_size, apart=True)
        remarks += _lost_by_another_plan(manifest, apart)
    if lasting is None or choice.directory.name not in lasting:
        make_last(choice.directory, storage)
    if lasting is not None:
        lasting.add(choice.directory.name)
    restored = RestoredCheckpoint(choice.directory.name, manifest.global_step, manifest.policy)
    batches = _batches(sets, manifest.batch_size)
    return Chosen(restored, manifest.run_id, manifest.generation, tuple(remarks), batches, apart)


def check_changed_copy(
    run: Run, name: str, of: str, storage: Storage = DISK, lasting: MutableSet[str] | None = None
) -> Chosen:
    """Returns the checkpoint ``name``, once its name is durable, if it is a copy of checkpoint
    ``of`` that differs in the values of tensors alone. Does not read the tensors.

    Args:
        lasting: as in :func:`choose_checkpoint`.

    Raises:
        CheckpointError: it is not; the message names the difference.
        OSError: the operating system refused; a retry may help.
    """
    checkpoints = run.run_dir / CHECKPOINTS
    directory, original = checkpoints / name, checkpoints / of
    manifest = read_manifest(directory, storage)
    check_identity(directory, manifest, run.run_id)
    expected = read_manifest(original, storage)
    facts: Sequence[tuple[str, Callable[[Path, Manifest], object]]] = (
        ("plan", lambda _, one: one.plan.hash.hex()),
        ("generation", lambda _, one: one.generation),
        ("global_step", lambda _, one: one.global_step),
        ("policy", lambda _, one: one.policy),
        ("versions", lambda _, one: [file.version for file in one.files]),
        ("slots", lambda path, one: slot_names(path, one, storage)),
        ("applied", lambda path, one: _plain(applied_sets(path, one, storage))),
        ("skipped", lambda path, one: _plain(applied_sets(path, one, storage, "skipped"))),
    )
    for what, read in facts:
        found, wanted = read(directory, manifest), read(original, expected)
        if found != wanted:
            raise CheckpointError(f"{directory} has {what} {found}, and {of} has {wanted}")
    make_last(directory, storage)
    if lasting is not None:
        lasting.add(name)
    restored = RestoredCheckpoint(name, manifest.global_step, manifest.policy)
    return Chosen(restored, manifest.run_id, manifest.generation, ())


def _plain(sets: Sequence[Mapping[int, IntervalSet]]) -> list[dict[int, list[tuple[int, int]]]]:
    return [{epoch: list(held) for epoch, held in one.items() if len(held)} for one in sets]


def _applied(choice: Choice, storage: Storage) -> list[dict[int, IntervalSet]]:
    """Returns each shard's applied-set by epoch, or nothing if unreadable: shards that load the
    checkpoint will report it."""
    try:
        return applied_sets(choice.directory, choice.manifest, storage)
    except CheckpointError:
        return []


def _lost_by_another_plan(manifest: Manifest, apart: int) -> list[str]:
    """Warns of batches that :func:`psrpc.checkpoint.load.load_state` cannot keep apart for another
    plan."""
    if not apart:
        return []
    return [
        f"{counted(apart, 'batch counts', 'batches count')} twice on parts of the "
        f"parameters: {manifest.name} was taken while some shards had applied them and others had "
        "not; go on with the plan that it was written with "
        f"({counted(manifest.plan.shards, 'shard')}) to avoid it"
    ]


def _batches(
    sets: Sequence[Mapping[int, IntervalSet]], batch_size: int, apart: bool = False
) -> int:
    """Counts the batches that all shards have applied, or with ``apart`` only some."""
    common = common_positions(sets)
    chosen = partial_positions(sets, common) if apart else common
    return sum(count_batches(positions, batch_size) for positions in chosen.values())


def _check_fits(directory: Path, manifest: Manifest, description: JobDescription) -> None:
    wanted: Sequence[tuple[str, object, object]] = (
        ("data", manifest.data_fingerprint, description.data_fingerprint),
        ("batch_size", manifest.batch_size, description.unit),
        ("seed", manifest.seed, description.seed),
    )
    whose = ""
    if manifest.job != description.name:
        whose = f", which is of job {manifest.job!r} and not of {description.name!r}"
    for name, theirs, ours in wanted:
        if theirs != ours and name == "batch_size" and description.local_steps > 1:
            # The checkpoint knows only the product.
            raise InvalidJob(
                f"cannot resume from {directory}{whose}: its batch_size x local_steps is {theirs}, "
                f"the job's is {description.batch_size} x {description.local_steps} = {ours}; "
                "batches would be lost or repeated. Set them back, or start a new run",
                code="PS405",
            )
        if theirs != ours and name == "data":
            raise InvalidJob(
                f"cannot resume from {directory}{whose}: the training data (train=) has changed, "
                f"and has {counted(description.train_records, 'record')} now: its data is "
                f"{theirs!r}, the job's is {ours!r}; batches would be lost or repeated. Give the "
                "data that it was trained on, or start a new run (init_from takes the "
                "values of parameters)",
                code="PS405",
            )
        if theirs != ours:
            raise InvalidJob(
                f"cannot resume from {directory}{whose}: its {name} is {theirs!r}, the job's is "
                f"{ours!r}; batches would be lost or repeated. Set it back, or start a new run",
                code="PS405",
            )
    try:
        # Tables first: another width of one also changes the layers behind it.
        compare_tables(directory, manifest.plan.tables, description.tables)
        compare_variables(directory, manifest.plan.variables, description.variables)
    except CheckpointError as error:
        raise InvalidJob(f"cannot resume: {error}", code=error.code) from None


def _check_slots(
    directory: Path, manifest: Manifest, description: JobDescription, storage: Storage
) -> None:
    """Raises InvalidJob if the checkpoint has another optimizer's slots: shards would refuse this
    run's checkpoints one after another."""
    if description.slots is None:
        return
    try:
        held = slot_names(directory, manifest, storage)
    except CheckpointError:
        return  # shards that load it will report it
    if held != sorted(description.slots):
        theirs, ours = (
            f"{optimizer.get('class_name')} ({', '.join(slots)})"
            for optimizer, slots in (
                (manifest.optimizer, held),
                (description.optimizer, description.slots),
            )
        )
        raise InvalidJob(
            f"cannot resume from {directory}: its optimizer is {theirs}, the job's is {ours}, "
            "which cannot go on from what that has kept. Set it back, or start a new run; "
            "init_from takes the values of parameters alone",
            code="PS405",
        )
