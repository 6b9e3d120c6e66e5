"""The manifest of a checkpoint: what makes a directory count, and which of them is used."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from psrpc.errors import CheckpointError, InvalidJob
from psrpc.plan import Plan
from psrpc.shard_file import fsync_directory

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class ManifestFile:
    """One shard's file as its shard wrote it."""

    shard: int
    name: str
    nbytes: int
    sha256: str
    version: int


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` says. ``details`` is for what only people and later versions need."""

    run_id: str
    name: str
    global_step: int
    generation: int
    policy: int
    mode: str
    replicas: int
    plan: Plan
    optimizer: Mapping[str, Any]
    engine: str
    seed: int
    batch_size: int
    data_fingerprint: str
    job: str
    job_sha256: str
    files: tuple[ManifestFile, ...]
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The text of the file."""
        document = {k: v for k, v in vars(self).items() if k not in ("plan", "files")}
        document["plan"] = json.loads(self.plan.to_json())
        document["files"] = [asdict(f) for f in self.files]
        return json.dumps({"format": FORMAT, **document}, indent=1, default=dict).encode()

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """The inverse of :meth:`to_json`. Raises KeyError, TypeError or ValueError."""
        document = json.loads(data)
        if document.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        document["plan"] = Plan.from_json(json.dumps(document["plan"]).encode())
        document["files"] = tuple(ManifestFile(**f) for f in document["files"])
        return Manifest(**document)


def commit(temporary: Path, final: Path, manifest: Manifest) -> None:
    """Makes the shards' files in ``temporary`` a checkpoint named ``final``; both are siblings of
    one directory or of one file system.

    Raises:
        CheckpointError: a file is not as the manifest says, or the operating system refused.
            Nothing is at ``final`` then.
    """
    for file in manifest.files:
        path = temporary / file.name
        if not path.is_file() or path.stat().st_size != file.nbytes:
            raise CheckpointError(f"{path} is missing or has not its {file.nbytes} bytes")
    try:
        with (temporary / MANIFEST).open("wb") as out:
            out.write(manifest.to_json())
            out.flush()
            os.fsync(out.fileno())
        fsync_directory(temporary)
        temporary.rename(final)
        fsync_directory(final.parent)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {final} cannot be committed: {error.strerror}"
        ) from error


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint; its files are not looked at.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = directory / MANIFEST
    try:
        return Manifest.from_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {MANIFEST}: it is not a checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError, InvalidJob) as error:
        raise CheckpointError(f"{path} is not a manifest: {error}") from error


def verify(directory: Path, manifest: Manifest) -> None:
    """Reads every file through and compares it with the manifest.

    Raises:
        CheckpointError: a file is missing, torn or changed; names it, what was expected and found.
    """
    shards = sorted(f.shard for f in manifest.files)
    if shards != list(range(manifest.plan.shards)):
        raise CheckpointError(
            f"{directory} has files of shards {shards}; expected all of {manifest.plan.shards}"
        )
    for file in manifest.files:
        path = directory / file.name
        if path.parent != directory:
            raise CheckpointError(f"{directory} names a file elsewhere: {file.name!r}")
        try:
            nbytes = path.stat().st_size
            if nbytes != file.nbytes:
                raise CheckpointError(f"{path} has {nbytes} bytes; expected {file.nbytes}")
            with path.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if digest != file.sha256:
            raise CheckpointError(f"{path} has SHA-256 {digest}; expected {file.sha256}")


@dataclass(frozen=True)
class Choice:
    """The checkpoint to use, and why newer ones are not: ``(path, reason)`` each."""

    directory: Path
    manifest: Manifest
    refused: tuple[tuple[Path, str], ...]


def newest_good(checkpoints: Path) -> Choice:
    """The newest verified checkpoint in a run's ``checkpoints`` directory.

    Newest is the highest generation, and in it the highest global step.

    Raises:
        CheckpointError: there is none; says what is wrong with each that is there.
    """
    refused: list[tuple[Path, str]] = []
    found: list[tuple[int, int, Path, Manifest]] = []
    for directory in sorted(checkpoints.iterdir()) if checkpoints.is_dir() else ():
        if directory.name.startswith(".") or not directory.is_dir():
            continue
        try:
            manifest = read_manifest(directory)
        except CheckpointError as error:
            refused.append((directory, str(error)))
        else:
            found.append((manifest.generation, manifest.global_step, directory, manifest))
    for _, _, directory, manifest in sorted(found, key=lambda f: f[:2], reverse=True):
        try:
            verify(directory, manifest)
        except CheckpointError as error:
            refused.append((directory, str(error)))
        else:
            return Choice(directory, manifest, tuple(refused))
    reasons = "".join(f"; {reason}" for _, reason in refused)
    raise CheckpointError(f"no good checkpoint in {checkpoints}{reasons}")
