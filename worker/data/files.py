"""Files that data sources read, local or in a store, by path or URL."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidData
from psrpc.files.remote import RemoteFile, find, read_ranges
from psrpc.files.remote_copies import copied_here
from psrpc.files.urls import location
from psrpc.ops.clock import MonotonicClock
from psrpc.ops.logs import get_logger
from psrpc.ops.retry import Announcer
from worker.data.permutation import RecordOrder
from worker.data.source import Batch, check_range

Found = Path | RemoteFile
"""A file that exists."""

_PIECE_NBYTES = 1 << 16
_PIECES = 1 << 10
_PIECES_AT_ONCE = 1 << 7

log = get_logger()


def existing_file(name: str, path: str | Path) -> Found:
    """Returns the file at ``path``, local or, for a URL, in a store.

    Args:
        name: the data source, for messages.

    Raises:
        InvalidData: the file does not exist, or the store is unusable.
    """
    place = location(path)
    if isinstance(place, Path):
        if not place.is_file():
            raise InvalidData(f"{name}: there is no file {str(place)!r}")
        return place
    found = find(place, patterns=False)
    if not found:
        raise InvalidData(f"{name}: there is no file {place!r}")
    return found[0]


def existing_files(name: str, paths: Sequence[str | Path]) -> list[Found]:
    """Returns the files at several paths, as :func:`existing_file` does. Files that match a pattern
    are sorted by name.

    Raises:
        InvalidData: a file does not exist, or no file matches a pattern.
    """
    found: list[Found] = []
    for path in paths:
        place = location(path)
        text = str(place)
        if not glob.has_magic(text):
            found.append(existing_file(name, path))
            continue
        matching: Sequence[Found] = (
            find(place)
            if isinstance(place, str)
            else [existing_file(name, one) for one in sorted(glob.glob(text))]  # noqa: PTH207
        )
        if not matching:
            raise InvalidData(f"{name}: no file matches {text!r}")
        found += matching
    return found


@contextmanager
def local_copy(found: Found) -> Iterator[Path]:
    """Yields a local path of a file for libraries that need one; it may be a temporary copy.

    Raises:
        InvalidData: copying fails.
    """
    if isinstance(found, Path):
        yield found
        return
    name = found.path.rpartition("/")[2]
    with copied_here(found.url, {name: found}) as folder:
        yield folder / name


Scan = Callable[[int, int], bytes]
"""Takes offset and length; returns that many bytes, fewer only at the end of the file. Offsets must
grow from call to call; a call may read ahead. For one thread."""


class LocalFile:
    """An open local file. Reading needs no lock."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened."""
        self.name = str(path)
        self._file: BinaryIO = path.open("rb")
        self.descriptor = self._file.fileno()
        self.nbytes = os.fstat(self.descriptor).st_size

    def scan(self) -> Scan:
        """Returns a reader that starts at the beginning of the file."""
        return lambda offset, length: os.pread(self.descriptor, length, offset)

    def close(self) -> None:
        """Closes the file; may be called again."""
        self._file.close()


class StoredFile:
    """A file in a store. It needs no closing."""

    def __init__(self, file: RemoteFile) -> None:
        self.name = file.url
        self.nbytes = file.nbytes
        self.file = file

    def scan(self) -> Scan:
        """Returns a reader as :meth:`LocalFile.scan` does, which logs its progress."""
        now = MonotonicClock().now
        progress = Announcer(
            lambda reason, waited_s: log.info(
                "waiting", waiting_for=reason, waited_s=round(waited_s)
            )
        )
        window_at, window = 0, b""

        def read(offset: int, length: int) -> bytes:
            nonlocal window_at, window
            length = max(0, min(length, self.nbytes - offset))
            if not window_at <= offset <= offset + length <= window_at + len(window):
                done = f"{offset / 1e9:.1f} of {self.nbytes / 1e9:.1f} GB"
                progress.waiting(f"the index of {self.name}: {done} read", now())
                window_at, window = offset, self.file.window(offset)
                if length > len(window):
                    [window] = read_ranges([(self.file, offset, length)])
            return window[offset - window_at : offset - window_at + length]

        return read

    def close(self) -> None:
        """Does nothing."""


DataFile = LocalFile | StoredFile


class DataFiles:
    """Open files. Any thread may :meth:`read`."""

    def __init__(self, found: Sequence[Found]) -> None:
        """Raises OSError if a file cannot be opened."""
        self.files: list[DataFile] = []
        try:
            for one in found:
                self.files.append(LocalFile(one) if isinstance(one, Path) else StoredFile(one))
        except BaseException:
            self.close()
            raise
        self._local = all(isinstance(file, LocalFile) for file in self.files)

    def read(self, spans: npt.NDArray[np.int64]) -> list[bytes]:
        """Returns the bytes of ``[n, 3]`` spans: file number, offset, length."""
        if not self._local:
            return self._read_stored(spans)
        descriptors = [file.descriptor for file in self.files if isinstance(file, LocalFile)]
        return [
            os.pread(descriptors[file], length, offset) for file, offset, length in spans.tolist()
        ]

    def _read_stored(self, spans: npt.NDArray[np.int64]) -> list[bytes]:
        parts = [(self.files[file], offset, length) for file, offset, length in spans.tolist()]
        rest = iter(
            read_ranges(
                [(file.file, at, n) for file, at, n in parts if isinstance(file, StoredFile)]
            )
        )
        return [
            os.pread(file.descriptor, length, offset) if isinstance(file, LocalFile) else next(rest)
            for file, offset, length in parts
        ]

    def close(self) -> None:
        """Closes all files; may be called again."""
        for file in self.files:
            file.close()


class RecordIndex:
    """The place of each record in open files. Reading needs no lock."""

    def __init__(self, found: Sequence[Found]) -> None:
        """Raises OSError if a file cannot be opened; a subclass calls :meth:`located` next."""
        self.files = DataFiles(found)

    def located(self, spans: npt.NDArray[np.int64]) -> None:
        """Sets the spans of the records, ``[n, 3]`` as for :meth:`DataFiles.read`."""
        self._spans = spans
        self.num_records = len(spans)
        self.order = RecordOrder(self.num_records)

    def read(self, records: npt.NDArray[np.int64]) -> list[bytes]:
        """Returns the bytes of each record."""
        return self.files.read(self._spans[records])


Index = TypeVar("Index", bound=RecordIndex)


class IndexedSource(Generic[Index]):
    """A data source whose records are found by an index, which the first use opens."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._index: Index | None = None

    def _open(self) -> Index:
        raise NotImplementedError

    def _batch(self, index: Index, records: npt.NDArray[np.int64]) -> Batch:
        raise NotImplementedError

    @property
    def num_records(self) -> int:
        return self._opened().num_records

    def read(self, seed: int, batch: BatchId) -> Batch:
        index = self._opened()
        stop = batch.first + batch.count
        check_range(type(self).__name__, batch.first, stop, index.num_records)
        return self._batch(index, index.order.records_at(seed, batch.epoch, batch.first, stop))

    def read_range(self, start: int, stop: int) -> Batch:
        index = self._opened()
        check_range(type(self).__name__, start, stop, index.num_records)
        return self._batch(index, np.arange(start, stop))

    def close(self) -> None:
        with self._lock:
            if self._index is not None:
                self._index.files.close()
            self._index = None

    def _opened(self) -> Index:
        with self._lock:
            if self._index is None:
                self._index = self._open()
            return self._index


def hash_files(files: Sequence[Found], *settings: object) -> str:
    """Returns the fingerprint of files read with ``settings``, independent of their location."""
    digest = hashlib.sha256(repr(settings).encode())
    for file in files:
        hash_file(file, digest)
    return digest.hexdigest()[:32]


def hash_file(file: Found, digest: Any) -> None:
    """Feeds the size and contents of a file to ``digest``; of a large file 1 024 evenly spread
    pieces of 64 KiB."""
    nbytes = file.stat().st_size if isinstance(file, Path) else file.nbytes
    digest.update(nbytes.to_bytes(8, "little"))
    spread = _spread(nbytes)
    pieces = _local_pieces(file, spread) if isinstance(file, Path) else _stored_pieces(file, spread)
    for piece in pieces:
        digest.update(piece)


def _spread(nbytes: int) -> list[tuple[int, int]]:
    """Returns offset and length of each piece."""
    if nbytes <= _PIECE_NBYTES * _PIECES:
        return [(at, min(_PIECE_NBYTES, nbytes - at)) for at in range(0, nbytes, _PIECE_NBYTES)]
    return [((nbytes - _PIECE_NBYTES) * i // (_PIECES - 1), _PIECE_NBYTES) for i in range(_PIECES)]


def _local_pieces(path: Path, spread: list[tuple[int, int]]) -> Iterator[bytes]:
    with path.open("rb") as file:
        for offset, length in spread:
            file.seek(offset)
            yield file.read(length)


def _stored_pieces(file: RemoteFile, spread: list[tuple[int, int]]) -> Iterator[bytes]:
    for at in range(0, len(spread), _PIECES_AT_ONCE):
        some = spread[at : at + _PIECES_AT_ONCE]
        yield from read_ranges([(file, offset, length) for offset, length in some])
