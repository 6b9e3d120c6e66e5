"""The manifest of a checkpoint.

``manifest.json`` contains the SHA-256 of each other file and ends with the SHA-256 of its own
preceding bytes. So any changed byte of a checkpoint is detected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from psrpc.checkpoint.rows_file import evicted_file_name, rows_file_name
from psrpc.core.document import anything, listed, parse_json, record, shown, text, whole
from psrpc.core.errors import CheckpointError, InvalidArgument, InvalidJob
from psrpc.core.names import check_file_name
from psrpc.core.plan import Plan
from psrpc.core.shard_reports import RowsFileEntry
from psrpc.files.storage import DISK, Storage, read_bounded

FORMAT = 2
"""The manifest's format. Format 1 had no checksum and is refused."""

MANIFEST = "manifest.json"

TEMPORARY = ".tmp-"
"""Prefix of the directories of unfinished and of removed checkpoints."""

_SEAL = b',\n "sha256": "'
"""Separates the sealed bytes from their digest."""


@dataclass(frozen=True)
class ManifestFile:
    """One shard's file as the shard wrote it, and the files of its rows
    (psrpc.checkpoint.rows_file). ``evicted`` is the file with the rows evicted since the previous
    checkpoint, if there are any."""

    shard: int
    name: str
    nbytes: int
    sha256: str
    version: int
    rows: tuple[RowsFileEntry, ...] = ()
    evicted: RowsFileEntry | None = None

    @property
    def every(self) -> tuple[RowsFileEntry, ...]:
        """All files of the shard; the file of its arenas is the first."""
        evicted = () if self.evicted is None else (self.evicted,)
        return (RowsFileEntry(self.name, self.nbytes, self.sha256), *self.rows, *evicted)

    @property
    def total_nbytes(self) -> int:
        """Size of all files of the shard in bytes."""
        return sum(file.nbytes for file in self.every)

    def to_json(self) -> dict[str, Any]:
        """Converts to JSON types. Omits the keys for rows and evicted rows if there are none, as in
        older manifests."""
        document = asdict(self)
        return {k: v for k, v in document.items() if v or k not in ("rows", "evicted")}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> ManifestFile:
        """The inverse of :meth:`to_json`, for JSON whose digest was verified."""
        rows = tuple(RowsFileEntry(**entry) for entry in document.get("rows", ()))
        evicted = document.get("evicted")
        evicted = None if evicted is None else RowsFileEntry(**evicted)
        return ManifestFile(**{**document, "rows": rows, "evicted": evicted})


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``. ``details`` has further information for users and later
    versions."""

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

    @property
    def every(self) -> tuple[RowsFileEntry, ...]:
        """All files of all shards."""
        return tuple(entry for file in self.files for entry in file.every)

    @property
    def nbytes(self) -> int:
        """Size of all files except the manifest, in bytes. Files that several checkpoints share are
        counted in each."""
        return sum(file.total_nbytes for file in self.files)

    def to_json(self) -> bytes:
        """Returns the text of the file."""
        document = {k: v for k, v in vars(self).items() if k not in ("plan", "files")}
        document["plan"] = json.loads(self.plan.to_json())
        document["files"] = [file.to_json() for file in self.files]
        document = {"format": FORMAT, **document}
        text = json.dumps(document, indent=1, default=dict, allow_nan=False)
        return _sealed(text.removesuffix("\n}").encode())

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: ``data`` is not a manifest; names the wrong field or the contradiction.
            InvalidJob: its plan is not valid.
        """
        head, _, _ = data.rpartition(_SEAL)
        if _sealed(head) != data:
            raise _why_unsealed(data)
        document = parse_json(data)
        if _FORMAT(document, "")["format"] != FORMAT:
            raise _OtherFormat(f"its format is {document['format']}; this version reads {FORMAT}")
        _CHECK(document, "")
        del document["format"], document["sha256"]
        document["plan"] = Plan.from_document(document["plan"])
        document["files"] = tuple(map(ManifestFile.from_json, document["files"]))
        return Manifest(**document)


_PART = record({"name": text, "nbytes": whole(), "sha256": text})
_FORMAT = record({"format": whole()}, more=True)
_CHECK = record(
    {
        "format": whole(),
        "run_id": text,
        "name": text,
        "global_step": whole(),
        "generation": whole(),
        "policy": whole(),
        "mode": text,
        "replicas": whole(),
        "plan": anything,
        "optimizer": record({}, {"class_name": text}, more=True),
        "engine": text,
        "seed": whole(0, 1 << 64),
        "batch_size": whole(1),
        "data_fingerprint": text,
        "job": text,
        "job_sha256": text,
        "files": listed(
            record(
                {
                    "shard": whole(),
                    "name": text,
                    "nbytes": whole(),
                    "sha256": text,
                    "version": whole(),
                },
                {"rows": listed(_PART), "evicted": _PART},
            )
        ),
        "details": record({}, {"overrides": listed(text)}, more=True),
        "sha256": text,
    }
)


def _sealed(head: bytes) -> bytes:
    return head + _SEAL + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'


class _OtherFormat(ValueError):
    """The manifest has another format, because another version of this software wrote it."""


def _why_unsealed(data: bytes) -> ValueError:
    try:
        written = _FORMAT(parse_json(data), "")["format"]
    except ValueError:
        written = FORMAT
    if written != FORMAT:
        return _OtherFormat(f"its format is {written!r}; this version reads {FORMAT}")
    return ValueError("its SHA-256 is not that of its text: it is torn, or was changed")


def read_manifest(directory: Path, storage: Storage = DISK) -> Manifest:
    """Reads the manifest of a checkpoint, without its other files.

    Raises:
        CheckpointError: there is no manifest, or it cannot be read.
    """
    path = directory / MANIFEST
    try:
        manifest = Manifest.from_json(read_bounded(path, storage=storage))
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} has no {MANIFEST}: it is not a checkpoint", code="PS404"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except _OtherFormat as error:
        raise CheckpointError(f"{path} is not a manifest: {error}", code="PS403") from error
    except (ValueError, InvalidJob) as error:
        raise CheckpointError(f"{path} is not a manifest: {error}") from error
    shards = sorted(f.shard for f in manifest.files)
    if shards != list(range(manifest.plan.shards)):
        raise CheckpointError(
            f"{directory} has files of shards {shown(shards)}; expected all of "
            f"{manifest.plan.shards}"
        )
    for file in manifest.every:
        try:
            check_file_name(file.name, f"a file of {directory}")
        except InvalidArgument as error:
            raise CheckpointError(str(error)) from None
        if file.name == MANIFEST:
            raise CheckpointError(f"{directory} names its manifest as a shard's file")
    for shard in manifest.files:
        _check_rows(directory, manifest, shard)
    names = [file.name for file in manifest.every]
    if len(set(names)) != len(names):
        raise CheckpointError(f"{directory} names a file for two purposes")
    return manifest


def _check_rows(directory: Path, manifest: Manifest, file: ManifestFile) -> None:
    """Checks that the files of a shard's rows have valid numbers and names.

    Raises:
        CheckpointError: they are not.
    """
    found = [entry.name for entry in file.rows]
    count = max(len(found), 1) if manifest.plan.tables_on(file.shard) else 0
    expected = [rows_file_name(file.shard, manifest.plan.shards, n) for n in range(count)]
    if found != expected:
        raise CheckpointError(
            f"{directory} has files {found} of shard {file.shard}'s rows; expected {expected}"
        )
    name = evicted_file_name(file.shard, manifest.plan.shards)
    if file.evicted is not None and file.evicted.name != name:
        raise CheckpointError(
            f"{directory} has the file {file.evicted.name!r} of shard {file.shard}'s evicted rows; "
            f"expected {name!r}"
        )


def check_identity(directory: Path, manifest: Manifest, run_id: str | None = None) -> None:
    """Checks that the manifest belongs to this checkpoint, and to the run if one is given.

    Raises:
        CheckpointError: it belongs to another.
    """
    if manifest.name != directory.name:
        raise CheckpointError(f"the manifest in {directory} is of {manifest.name}")
    if run_id is not None and manifest.run_id != run_id:
        raise CheckpointError(f"{directory} is of run {manifest.run_id}; expected {run_id}")
