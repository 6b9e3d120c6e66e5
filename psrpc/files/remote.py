"""Files that URLs name: objects of S3 and Google Cloud Storage, files of HDFS, what fsspec knows.

fsspec is an extra (``pip install 'tf-pserver[remote]'``), imported when a URL is used. Files of
this machine never pass through it; ``file://`` is a path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import Any

from psrpc.core.errors import InvalidData
from psrpc.files.remote_calls import CODE, NotThere, call, translated

# Several with :: between them are fsspec's, as in simplecache::s3://bucket/key.
_URL = re.compile(r"(?:[A-Za-z][\w+.-]*::)*[A-Za-z][\w+.-]*://")
_LOST_SLASH = re.compile(r"[A-Za-z][\w+.-]+:/[^/]")


WINDOW_NBYTES = 32 << 20
"""Read at a time of what is read from one end to the other, in pieces that come side by side."""

_PIECE_NBYTES = 8 << 20


@dataclass(frozen=True, eq=False)
class RemoteFile:
    """A file that is there. Thread-safe.

    Attributes:
        url: its name, for messages.
        nbytes: its size when it was found.
        filesystem: fsspec's, and ``path`` the name there.
    """

    url: str
    nbytes: int
    filesystem: Any = field(repr=False)
    path: str = field(repr=False)

    def window(self, offset: int) -> bytes:
        """Up to ``WINDOW_NBYTES`` from ``offset`` on; empty at the end."""
        stop = min(offset + WINDOW_NBYTES, self.nbytes)
        starts = range(offset, stop, _PIECE_NBYTES)
        return b"".join(read_ranges([(self, at, min(_PIECE_NBYTES, stop - at)) for at in starts]))

    def windows(self) -> Iterator[bytes]:
        """All of it, in order, in pieces of up to ``WINDOW_NBYTES``."""
        for at in range(0, self.nbytes, WINDOW_NBYTES):
            yield self.window(at)


def open_store(url: str) -> tuple[Any, str]:
    """The file system that fsspec has for a URL, and the name there.

    Raises:
        InvalidData: a package is missing, or there is no such protocol.
    """

    def opened() -> tuple[Any, str]:
        import fsspec

        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
        return found

    # Some ask the network who this is.
    return call(url, opened)


def exists(url: str) -> bool:
    """Whether there is a file or a directory. Raises InvalidData: the store cannot be used."""
    filesystem, path = open_store(url.rstrip("/"))

    def look() -> bool:
        filesystem.invalidate_cache()
        # Not its own exists, which takes every error for no.
        return bool(filesystem.info(path))

    try:
        return call(url, look)
    except NotThere:
        return False


def find(url: str, *, patterns: bool = True) -> list[RemoteFile]:
    """The file that ``url`` names, or with ``patterns`` those that match it where it has ``*``,
    ``?`` or ``[``, by name; empty if there is none.

    Raises:
        InvalidData: the store cannot be used; says why.
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
    """The files right below a directory, by name; empty if there is no such directory.

    Raises:
        InvalidData: the store cannot be used; says why.
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
    """The bytes of each range (file, offset, length); those of one store come side by side.

    Raises:
        InvalidData: they cannot be read, or a file has become shorter.
    """
    found = [b""] * len(ranges)
    stores: dict[int, list[int]] = {}
    for number, (file, _, length) in enumerate(ranges):
        # Of no bytes there is no range.
        if length:
            stores.setdefault(id(file.filesystem), []).append(number)
    for numbers in stores.values():
        parts = [ranges[number] for number in numbers]
        for number, data in zip(numbers, call(_shown(parts), partial(_read, parts)), strict=True):
            found[number] = data
    return found


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


def is_url(name: object) -> bool:
    """Whether it names something by a URL, ``file://`` among them."""
    return isinstance(name, str) and _URL.match(name) is not None


def location(name: str | Path) -> Path | str:
    """A path of this machine, or the URL as it is.

    Raises:
        InvalidData: it is a URL in a ``Path``, which has taken a slash away.
    """
    text = str(name)
    if isinstance(name, Path) and _LOST_SLASH.match(text):
        raise InvalidData(f"{text!r} is a URL in a Path, which takes a slash away; give a string")
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return text if is_url(text) else Path(text)
