"""Copies whole files from stores, for libraries that need a path, and to stores."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from psrpc.core.errors import InvalidData, PsError, disk_code, disk_reason
from psrpc.files.remote import RemoteFile, open_store
from psrpc.files.remote_calls import CALL_S, call

SLOWEST_NBYTES_PER_S = 1e6
"""Lowest upload rate: the deadline of an upload is its time at this rate plus a call's deadline."""

_OBJECT_STORES = {"abfs", "abfss", "az", "gcs", "gs", "memory", "s3", "s3a"}
"""Protocols that store an object completely or not at all, and need no directories."""

_LAST = ("fingerprint.pb", "saved_model.pb")
"""Files of a SavedModel that are uploaded last, since it cannot be loaded without
``saved_model.pb``."""


@contextmanager
def copied_here(url: str, files: Mapping[str, RemoteFile]) -> Iterator[Path]:
    """Copies ``files``, by name, into a temporary directory (below ``TMPDIR``) for the length of
    the context.

    Raises:
        InvalidData: a file is unreadable, or there is no room.
    """
    needed = sum(file.nbytes for file in files.values())
    with tempfile.TemporaryDirectory(prefix="pserver-copy-") as name:
        folder = Path(name)
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise InvalidData(
                f"{url} has {needed} bytes, and {folder.parent} has room for {free}: make room, or "
                "name another directory with TMPDIR",
                code="PS502",
            )
        for file_name, file in files.items():
            try:
                with (folder / file_name).open("xb") as copy:
                    for window in file.windows():
                        copy.write(window)
            except OSError as error:
                raise InvalidData(
                    f"{file.url} cannot be copied to {folder}: {disk_reason(error)}",
                    code=disk_code(error),
                ) from None
        yield folder


@contextmanager
def written_to(place: Path | str) -> Iterator[Path]:
    """Yields a directory for writing files to ``place``: a path itself, or for a URL a temporary
    directory, whose files are uploaded when the context ends without an error.

    Raises:
        InvalidData: the upload failed.
    """
    if isinstance(place, Path):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="pserver-copy-") as name:
        folder = Path(name)
        yield folder
        for path in sorted(folder.iterdir()):
            upload(path, f"{place.rstrip('/')}/{path.name}")


def upload(source: Path, url: str) -> None:
    """Uploads a file, or a directory recursively.

    Each file appears complete or not at all, and ``saved_model.pb`` of a SavedModel is uploaded
    last. If the upload of a directory fails, its uploaded files are removed, unless the store fails
    again.

    Raises:
        InvalidData: the upload failed; says why.
    """
    filesystem, root = open_store(url.rstrip("/"))
    if source.is_file():
        _put(filesystem, source, root, url)
        return
    done = []
    try:
        for path in sorted(filter(Path.is_file, source.rglob("*")), key=_order):
            name = path.relative_to(source).as_posix()
            _put(filesystem, path, f"{root}/{name}", f"{url.rstrip('/')}/{name}")
            done.append(f"{root}/{name}")
    except PsError:
        with suppress(PsError):
            call(url, lambda: [filesystem.rm_file(path) for path in done])
        raise


def _order(path: Path) -> tuple[int, str]:
    last = _LAST.index(path.name) + 1 if path.name in _LAST else 0
    return last, path.as_posix()


def _put(filesystem: Any, source: Path, path: str, url: str) -> None:
    protocols = filesystem.protocol
    names = {protocols} if isinstance(protocols, str) else set(protocols)

    def put() -> None:
        if names & _OBJECT_STORES:
            filesystem.put_file(str(source), path)
            return
        parent, _, name = path.rpartition("/")
        unfinished = f"{parent}/.{name}.partial"
        filesystem.makedirs(parent, exist_ok=True)
        filesystem.put_file(str(source), unfinished)
        filesystem.mv(unfinished, path)

    call(url, put, CALL_S + source.stat().st_size / SLOWEST_NBYTES_PER_S)
