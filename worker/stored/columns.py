"""Columns of records in ``.npy`` files: written piece by piece, read as memory maps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from psrpc.core.errors import InvalidData, PsError, disk_code, disk_reason
from worker.data.ragged import Ragged
from worker.data.source import Array

PIECE_NBYTES = 16 << 20
"""How much of an array is converted and written at a time."""
_LENGTH = np.dtype("<u4")


def is_text(dtype: np.dtype[Any]) -> bool:
    """Whether values of this dtype are strings. Objects are: others were refused before."""
    return dtype.kind in "SUO"


class NpyWriter:
    """Writes a ``.npy`` file whose number of rows is known at its end."""

    def __init__(self, path: Path, dtype: np.dtype[Any], row_shape: tuple[int, ...] = ()) -> None:
        self._path = path
        self._dtype = dtype
        self._row_shape = row_shape
        self._rows = 0
        self.nbytes = 0
        """Size of the rows so far."""
        self._file = path.open("xb", buffering=0)
        self._write_header()

    def append(self, rows: Array) -> None:
        """Writes rows ``[n, *row_shape]`` of any dtype and layout, in pieces.

        Raises:
            PsError: PS502, PS503 or PS504 with the system's reason.
        """
        row_nbytes = max(1, self._dtype.itemsize * int(np.prod(self._row_shape, dtype=np.int64)))
        step = max(1, PIECE_NBYTES // row_nbytes)
        for start in range(0, len(rows), step):
            piece = np.ascontiguousarray(rows[start : start + step], self._dtype)
            left = memoryview(piece.reshape(-1).view(np.uint8).data)
            try:
                while left:
                    left = left[self._file.write(left) or 0 :]
            except OSError as error:
                raise PsError(
                    f"data cannot be written to {str(self._path)!r}: {disk_reason(error)}",
                    code=disk_code(error),
                ) from error
            self.nbytes += piece.nbytes
        self._rows += len(rows)

    def complete(self) -> None:
        """Writes the number of rows."""
        # NumPy's header leaves room for the number to grow.
        self._file.seek(0)
        self._write_header()

    def close(self) -> None:
        """Closes the file, completed or not."""
        self._file.close()

    def _write_header(self) -> None:
        fields = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._rows, *self._row_shape),
        }
        np.lib.format.write_array_header_1_0(self._file, fields)


class ColumnWriter:
    """Writes one column, of arrays or :class:`Ragged <worker.data.ragged.Ragged>` with equal rows.

    A string is stored as its length and its UTF-8 bytes, so a long one makes no other one larger.
    """

    def __init__(self, folder: Path, index: int, like: Any, dtype: np.dtype[Any]) -> None:
        """``like`` has the form of all rows; ``dtype`` is that of the file."""
        self._ragged = isinstance(like, Ragged)
        self._text = is_text(dtype)
        self._row_shape = tuple(like.shape[2:] if self._ragged else like.shape[1:])
        self._splits: NpyWriter | None = None
        self._end = 0
        description: dict[str, Any] = {"file": f"{index}.npy"}
        if self._ragged or self._text:
            description["splits"] = f"{index}-splits.npy"
            self._splits = NpyWriter(folder / description["splits"], np.dtype(np.int64))
            self._splits.append(np.zeros(1, np.int64))
        if self._text:
            description["text"] = [-1] if self._ragged else list(self._row_shape)
            self._values = NpyWriter(folder / description["file"], np.dtype(np.uint8))
        else:
            self._values = NpyWriter(folder / description["file"], dtype, self._row_shape)
        self.description = description
        """JSON-able; :func:`open_column` takes it."""

    def append(self, column: Any) -> None:
        """Writes more rows. Raises as :meth:`NpyWriter.append`."""
        if self._text:
            for piece in _pieces(column):
                self._append(_encoded(piece))
        else:
            self._append(column)

    def _append(self, column: Any) -> None:
        if isinstance(column, Ragged):
            assert self._splits is not None
            self._values.append(column.values)
            self._splits.append(column.row_splits[1:] + self._end)
            self._end += len(column.values)
        else:
            self._values.append(column)

    @property
    def nbytes(self) -> int:
        """Size of the rows so far."""
        return self._values.nbytes + (0 if self._splits is None else self._splits.nbytes)

    def complete(self) -> None:
        """Completes the files."""
        self._values.complete()
        if self._splits is not None:
            self._splits.complete()

    def close(self) -> None:
        """Closes the files, completed or not."""
        self._values.close()
        if self._splits is not None:
            self._splits.close()


def open_column(folder: Path, description: dict[str, Any]) -> Any:
    """Returns a stored column as a memory map, or as a ``Ragged`` of memory maps. Strings have to
    be :func:`decoded`.

    Raises:
        InvalidData: a file is gone or torn.
    """
    values = _mapped(folder / description["file"])
    if "splits" not in description:
        return values
    return Ragged(values, _mapped(folder / description["splits"]))


def decoded(rows: Ragged, shape: list[int]) -> Any:
    """Returns the strings of encoded rows, as objects ``[n, *shape]``, UTF-8 bytes; a ``Ragged``
    where the shape is ``[-1]``."""
    data = rows.values.tobytes()
    found: list[bytes] = []
    ends = [0]
    at = 0
    for end in rows.row_splits[1:].tolist():
        while at < end:
            start = at + _LENGTH.itemsize
            at = start + int.from_bytes(data[at:start], "little")
            found.append(data[start:at])
        ends.append(len(found))
    strings = np.empty(len(found), object)
    strings[:] = found
    if shape == [-1]:
        return Ragged(strings, np.array(ends, np.int64))
    return strings.reshape(len(rows), *shape)


def _mapped(path: Path) -> Array:
    try:
        # The plain view of the map: slices of a np.memmap are several times slower.
        array: Array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise InvalidData(
            f"data handed to the cluster cannot be read from {str(path)!r}: {error}; "
            "call fit again, it writes them anew"
        ) from error
    return array


def _pieces(column: Any) -> Iterator[Any]:
    for start in range(0, len(column), 8192):
        yield column[start : start + 8192]


def _encoded(rows: Any) -> Ragged:
    """Returns ``[n]`` ragged uint8, the encoded strings of each row."""
    if isinstance(rows, Ragged):
        strings, ends = rows.values.tolist(), rows.row_splits[1:]
    else:
        width = int(np.prod(rows.shape[1:], dtype=np.int64))
        strings = rows.reshape(-1).tolist()
        ends = np.arange(1, len(rows) + 1) * width
    raw = [each.encode() if isinstance(each, str) else each for each in strings]
    lengths = np.array([len(each) for each in raw], _LENGTH)
    parts: list[bytes] = [b""] * (2 * len(raw))
    parts[::2] = [each.tobytes() for each in lengths]
    parts[1::2] = raw
    splits: npt.NDArray[np.int64] = np.zeros(len(rows) + 1, np.int64)
    sizes = np.concatenate([[0], np.cumsum(lengths.astype(np.int64) + _LENGTH.itemsize)])
    splits[1:] = sizes[ends]
    return Ragged(np.frombuffer(b"".join(parts), np.uint8), splits)
