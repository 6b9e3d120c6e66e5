"""Finds the checkpoints of a directory, and the newest undamaged one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from psrpc.checkpoint.directory import verify
from psrpc.checkpoint.manifest import Manifest, check_identity, read_manifest
from psrpc.core.errors import CheckpointError, InvalidArgument
from psrpc.core.names import check_file_name
from psrpc.core.text import sanitize
from psrpc.files.durable import RENAMED
from psrpc.files.storage import DISK, Storage

_NAMELESS = (
    "a coordinator was giving it its name anew; if that has ended, the next one that goes on with "
    "the run does so"
)


@dataclass(frozen=True)
class Choice:
    """The checkpoint to use, and why newer ones are unusable: ``(path, reason)`` each."""

    directory: Path
    manifest: Manifest
    refused: tuple[tuple[Path, str], ...]


@dataclass(frozen=True)
class FoundCheckpoints:
    """The checkpoints in a ``checkpoints`` directory: those with readable manifests, newest first,
    and the others with the reasons."""

    manifests: tuple[tuple[Path, Manifest], ...]
    refused: tuple[tuple[Path, str], ...]


def find_checkpoints(checkpoints: Path, storage: Storage = DISK) -> FoundCheckpoints:
    """Finds the checkpoints in a run's ``checkpoints`` directory; reads only manifests.

    The newest has the highest generation, among these the highest global step, and among these the
    last name; a changed copy of a checkpoint has the name of the original plus a suffix.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    try:
        names = storage.directories(checkpoints)
    except OSError as error:
        raise CheckpointError(f"{checkpoints} cannot be read: {error.strerror}") from error
    found: list[tuple[Path, Manifest]] = []
    refused: list[tuple[Path, str]] = []
    for name in names:
        if name.startswith(RENAMED) and name.removeprefix(RENAMED) not in names:
            refused.append((checkpoints / sanitize(name).replace("\n", " "), _NAMELESS))
        if name.startswith("."):
            continue
        try:
            check_file_name(name, f"a directory in {checkpoints}")
        except InvalidArgument as error:
            # Sanitized, because even a terminal must not get such a name.
            refused.append((checkpoints / sanitize(name).replace("\n", " "), str(error)))
            continue
        directory = checkpoints / name
        try:
            manifest = read_manifest(directory, storage)
            check_identity(directory, manifest)
        except CheckpointError as error:
            refused.append((directory, str(error)))
            continue
        found.append((directory, manifest))
    found.sort(key=lambda item: (item[1].generation, item[1].global_step, item[1].name))
    found.reverse()
    return FoundCheckpoints(tuple(found), tuple(refused))


def newest_good(
    checkpoints: Path,
    run_id: str | None = None,
    refused: Mapping[str, str] | None = None,
    storage: Storage = DISK,
) -> Choice:
    """Returns the newest checkpoint in a run's ``checkpoints`` directory that is undamaged.

    Args:
        run_id: the run to which the checkpoint must belong; None for any.
        refused: names of checkpoints that must not be used -> the reasons.

    Raises:
        CheckpointError: there is none; gives the reason for each checkpoint in the directory.
    """
    found = find_checkpoints(checkpoints, storage)
    passed_over = list(found.refused)
    for directory, manifest in found.manifests:
        try:
            if directory.name in (refused or {}):
                raise CheckpointError((refused or {})[directory.name])
            check_identity(directory, manifest, run_id)
            verify(directory, manifest, storage)
        except CheckpointError as error:
            passed_over.append((directory, str(error)))
        else:
            return Choice(directory, manifest, tuple(passed_over))
    reasons = "".join(f"; {reason}" for _, reason in passed_over)
    raise CheckpointError(f"no good checkpoint in {checkpoints}{reasons}", code="PS404")
