"""``coordinator export``: writes a run's checkpoint as a file that plain Keras loads, and its
tables.

The coordinator chooses the checkpoint and finds the job. The user's code builds the model, so
``worker export`` runs in a process of its own. Tables need neither job nor TensorFlow.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from coordinator.checkpoints.pruning import best_checkpoint
from coordinator.export.tables import export_evicted, export_tables, export_variables
from psrpc.checkpoint.checkpoint import Manifest, newest_good, read_manifest, verify
from psrpc.checkpoint.choice import find_checkpoints
from psrpc.checkpoint.manifest import MANIFEST
from psrpc.core.document import record, text
from psrpc.core.errors import CheckpointError, InvalidArgument, InvalidJob, PsError, error_line
from psrpc.core.names import CHECKPOINTS, JOB, check_file_name
from psrpc.core.text import counted
from psrpc.files.remote_copies import written_to
from psrpc.files.run_paths import read_summary
from psrpc.files.storage import cause_of, read_bounded, read_json
from psrpc.files.urls import similar_path
from psrpc.ops.process import child_environment, module_command


def run(args: argparse.Namespace) -> int:
    """Exports; returns 0, or 2 after one line on standard error."""
    try:
        if args.to is None and args.tables is None and args.evicted is None:
            raise InvalidArgument(
                "nothing to export; say --to PATH, --tables DIRECTORY or --evicted DIRECTORY",
                code="PS113",
            )
        if args.tables is not None or args.evicted is not None:
            _export_tables(args.source, args.step, args.tables, args.evicted)
        if args.to is None:
            return 0
        source = find_source(args.source, args.step, args.job)
    except PsError as error:
        _say(error_line(error))
        return 2
    for remark in source.remarks:
        _say(remark)
    return _export_model(source, args.to)


def _export_tables(
    source: Path, step: int | None, to: Path | str | None, evicted: Path | str | None
) -> None:
    if to is not None and evicted is not None and _same(to, evicted):
        raise InvalidArgument(
            f"--tables and --evicted are both {to}; their files have the same names"
        )
    directory, manifest, remarks = _choose(source, step)
    exported: list[tuple[str, str]] = []
    if to is not None:
        with written_to(to) as folder:
            tables = export_tables(directory, manifest, folder)
            others = export_variables(directory, manifest, folder)
        exported += [
            (_in(to, table.path), f"{counted(table.rows, 'row')} of {table.width}")
            for table in tables
        ]
        if not tables:
            remarks.append(f"{directory} has no embedding tables; it has variables alone")
        what = counted(others.variables, "other variable" if tables else "variable")
        exported.append((_in(to, others.path), f"{what}, {counted(others.elements, 'element')}"))
    if evicted is not None:
        with written_to(evicted) as folder:
            tables, more = export_evicted(directory, manifest, folder)
        exported += [
            (_in(evicted, table.path), f"{counted(table.rows, 'evicted row')} of {table.width}")
            for table in tables
        ]
        remarks += more
    for remark in dict.fromkeys(remarks):
        _say(remark)
    for path, what in exported:
        _say(f"wrote {path} from {directory} (step {manifest.global_step}): {what}")


def _in(place: Path | str, written: Path) -> str:
    """Returns the path of ``written`` within ``place``."""
    return f"{str(place).rstrip('/')}/{written.name}"


def _same(one: Path | str, other: Path | str) -> bool:
    if isinstance(one, Path) and isinstance(other, Path):
        return one.resolve() == other.resolve()
    return str(one).rstrip("/") == str(other).rstrip("/")


def _export_model(source: Source, to: str) -> int:
    command = module_command("worker.cli", "export", source.job, str(source.checkpoint))
    command += ["--to", to]
    for override in source.overrides:
        command += ["--set", override]
    environment = child_environment(os.environ)
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, check=False)
    status = ended.returncode
    if status == 0:
        _say(f"wrote {to} from {source.checkpoint} (step {source.global_step})")
    return 2 if status else 0


@dataclass(frozen=True)
class Source:
    """The checkpoint to export, with remarks on the choice for the user."""

    checkpoint: Path
    global_step: int
    job: str
    overrides: tuple[str, ...]
    remarks: tuple[str, ...]


def find_source(source: Path, step: int | None, job: str | None) -> Source:
    """Chooses the checkpoint and finds its job.

    Args:
        source: a run directory, or the directory of one checkpoint.
        step: the global step of the checkpoint; None selects the newest good one.
        job: the path of the job file; None selects the run's.

    Raises:
        CheckpointError: no such checkpoint, or it is damaged.
        InvalidJob: the job file cannot be read.
    """
    checkpoint, manifest, remarks = _choose(source, step)
    path = job if job is not None else _job_of(checkpoint.parent.parent)
    try:
        digest = hashlib.sha256(read_bounded(Path(path))).hexdigest()
    except OSError as error:
        raise InvalidJob(
            f"cannot read the job file {path}: {error.strerror}; say where it is with --job FILE",
            code="PS102",
        ) from None
    if digest != manifest.job_sha256:
        remarks.append(f"{path} has changed since the checkpoint was written")
    overrides = tuple(manifest.details.get("overrides", ()))
    return Source(checkpoint, manifest.global_step, path, overrides, tuple(remarks))


def _choose(source: Path, step: int | None) -> tuple[Path, Manifest, list[str]]:
    if not source.is_dir():
        raise CheckpointError(
            f"there is no directory {source}; expected a run or a checkpoint{similar_path(source)}",
            code="PS404",
        )
    checkpoints = source / CHECKPOINTS
    if not (checkpoints.is_dir() or (source / MANIFEST).exists()):
        raise CheckpointError(
            f"{source} has neither {CHECKPOINTS}/ nor {MANIFEST}; expected a run or a checkpoint",
            code="PS404",
        )
    best = read_summary(source).get("best") if step is None else None
    if best is not None and best.get("restored", True):
        directory = source / best["checkpoint"]
        try:
            check_file_name(directory.name, "the checkpoint of the best epoch")
            directory = checkpoints / directory.name
            manifest = read_manifest(directory)
            verify(directory, manifest)
        except PsError as error:
            raise CheckpointError(
                f"the checkpoint of the best epoch, {best['epoch']}, cannot be used: {error}; "
                "choose another with --step"
            ) from None
        return directory, manifest, [f"{directory.name} is of the best epoch, {best['epoch']}"]
    if step is None and checkpoints.is_dir():
        choice = newest_good(checkpoints)
        remarks = [f"passed over {path.name}: {reason}" for path, reason in choice.refused]
        remarks += _better(source, choice.manifest)
        return choice.directory, choice.manifest, remarks
    if step is not None:
        found = find_checkpoints(checkpoints)
        there = {path: manifest.global_step for path, manifest in found.manifests}
        # Several generations may have reached the step; the newest comes first.
        source = next((path for path, its in there.items() if its == step), source)
        if source not in there:
            names = ", ".join(sorted(path.name for path in there)) or "none"
            raise CheckpointError(
                f"{checkpoints} has no checkpoint of step {step}; it has {names}", code="PS404"
            )
    manifest = read_manifest(source)
    verify(source, manifest)
    return source, manifest, []


def _better(run_dir: Path, chosen: Manifest) -> list[str]:
    """Returns a remark if the run keeps a better checkpoint than the ``chosen`` one."""
    found = best_checkpoint(run_dir)
    if found is None or found[0].name == chosen.name:
        return []
    manifest, objective, score = found
    step = manifest.global_step
    # If a resumed run has reached the step again, --step selects its newest checkpoint.
    of_step = [m for _, m in find_checkpoints(run_dir / CHECKPOINTS).manifests]
    one = sum(m.global_step == step for m in of_step) == 1
    takes = f"--step {step}" if one else f"{run_dir / CHECKPOINTS / manifest.name} in place of it"
    return [
        f"{chosen.name} is the newest checkpoint; step {step} was best "
        f"({objective.metric} {score:.4g}); {takes} takes it"
    ]


def _job_of(run_dir: Path) -> str:
    """Returns the job's path as the run was given it."""
    path = run_dir / JOB
    try:
        return str(record({"job": text}, more=True)(read_json(path), "")["job"])
    except (OSError, ValueError) as error:
        raise InvalidJob(
            f"{path} does not say where the job file is ({cause_of(error)}); say it with --job FILE"
        ) from None


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201
