"""Reads files at URLs: S3, Google Cloud Storage, HDFS and all others that fsspec supports.

fsspec is an extra (``pip install 'tf-pserver[remote]'``), imported on first use of a URL. Local
files never pass through it; ``file://`` is a path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from glob import has_magic
from typing import Any

from psrpc.core.errors import InvalidData
from psrpc.files.remote_calls import CODE, NotThere, call, translated

WINDOW_NBYTES = 32 << 20
"""Bytes per read of a sequentially read file. Each read is fetched in parallel pieces."""

_PIECE_NBYTES = 8 << 20


@dataclass(frozen=True, eq=False)
class RemoteFile:
    """An existing remote file. Thread-safe.

    Attributes:
        url: the URL of the file, for messages.
        nbytes: its size when it was found.
        filesystem: the fsspec file system, which has the file at ``path``.
    """

    url: str
    nbytes: int
    filesystem: Any = field(repr=False)
    path: str = field(repr=False)

    def window(self, offset: int) -> bytes:
        """Reads up to ``WINDOW_NBYTES`` from ``offset`` on; empty at the end."""
        stop = min(offset + WINDOW_NBYTES, self.nbytes)
        starts = range(offset, stop, _PIECE_NBYTES)
        return b"".join(read_ranges([(self, at, min(_PIECE_NBYTES, stop - at)) for at in starts]))

    def windows(self) -> Iterator[bytes]:
        """Reads the file in order, in pieces of up to ``WINDOW_NBYTES``."""
        for at in range(0, self.nbytes, WINDOW_NBYTES):
            yield self.window(at)


def open_store(url: str) -> tuple[Any, str]:
    """Returns the fsspec file system of a URL, and the path in it.

    Raises:
        InvalidData: a package is missing, or the protocol is unknown.
    """

    def opened() -> tuple[Any, str]:
        import fsspec

        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
        return found

    # Some file systems query the network for their identity.
    return call(url, opened)


def exists(url: str) -> bool:
    """Whether a file or directory exists. Raises InvalidData if the store is unusable."""
    filesystem, path = open_store(url.rstrip("/"))

    def look() -> bool:
        filesystem.invalidate_cache()
        # Not fsspec's own exists, which returns False on every error.
        return bool(filesystem.info(path))

    try:
        return call(url, look)
    except NotThere:
        return False


def find(url: str, *, patterns: bool = True) -> list[RemoteFile]:
    """Finds the file at ``url``, or with ``patterns`` the files that match its ``*``, ``?`` or
    ``[``, sorted by name; empty if there is none.

    Raises:
        InvalidData: the store is unusable; says why.
    """
    filesystem, path = open_store(url)
    pattern = patterns and has_magic(path)

    def look() -> list[tuple[str, dict[str, Any]]]:
        filesystem.invalidate_cache()
        if pattern:
            return sorted(filesystem.glob(path, detail=True).items())
        return [(path, filesystem.info(path))]

    try:
        found = call(url, look)
    except NotThere:
        return []
    return [
        _file(filesystem.unstrip_protocol(path) if pattern else url, info, filesystem, path)
        for path, info in found
        if info["type"] == "file"
    ]


def find_in(url: str) -> dict[str, RemoteFile]:
    """Returns the files directly in a directory by name; empty if there is no such directory.

    Raises:
        InvalidData: the store is unusable; says why.
    """
    filesystem, path = open_store(url.rstrip("/"))

    def look() -> list[dict[str, Any]]:
        filesystem.invalidate_cache()
        return list(filesystem.ls(path, detail=True))

    try:
        found = call(url, look)
    except NotThere:
        return {}
    files = {info["name"].rpartition("/")[2]: info for info in found if info["type"] == "file"}
    return {
        name: _file(f"{url.rstrip('/')}/{name}", info, filesystem, info["name"])
        for name, info in files.items()
    }


def _file(url: str, info: dict[str, Any], filesystem: Any, path: str) -> RemoteFile:
    if info["size"] is None:
        raise InvalidData(f"{url}: the server does not say how long it is", code=CODE)
    return RemoteFile(url, int(info["size"]), filesystem, path)


def read_ranges(ranges: Sequence[tuple[RemoteFile, int, int]]) -> list[bytes]:
    """Reads ranges (file, offset, length), in parallel for each store.

    Raises:
        InvalidData: a range is unreadable, or a file has become shorter.
    """
    contents = [b""] * len(ranges)
    stores: dict[int, list[int]] = {}
    for number, (file, _, length) in enumerate(ranges):
        if length:  # stores have no empty ranges
            stores.setdefault(id(file.filesystem), []).append(number)
    for numbers in stores.values():
        parts = [ranges[number] for number in numbers]
        for number, data in zip(numbers, call(_shown(parts), partial(_read, parts)), strict=True):
            contents[number] = data
    return contents


def _read(ranges: Sequence[tuple[RemoteFile, int, int]]) -> list[bytes]:
    paths = [file.path for file, _, _ in ranges]
    starts = [offset for _, offset, _ in ranges]
    stops = [offset + length for _, offset, length in ranges]
    got = ranges[0][0].filesystem.cat_ranges(paths, starts, stops, on_error="return")
    for (file, offset, length), data in zip(ranges, got, strict=True):
        shorter = isinstance(data, OSError) and "range" in str(data)  # HTTP's 416
        if isinstance(data, BaseException) and not shorter:
            raise translated(file.url, data)
        if shorter or len(data) != length:
            raise InvalidData(
                f"{file.url} has no {length} bytes at {offset} any more: it was changed since it "
                "was opened",
                code=CODE,
            )
    return list(got)


def _shown(ranges: Sequence[tuple[RemoteFile, int, int]]) -> str:
    urls = dict.fromkeys(file.url for file, _, _ in ranges)
    first = next(iter(urls))
    return first if len(urls) == 1 else f"{first} and {len(urls) - 1} more"
