"""Criteo's files: a line an impression, ``label, I1 .. I13, C1 .. C26`` with tabs between, the
categories in hexadecimal; what is missing is empty."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from psrpc.core.errors import InvalidJob
from worker.data.files import hash_file

from .records import CATEGORICAL, MISSING, NUMERIC, Records

COLUMNS = 1 + NUMERIC + CATEGORICAL

_SCAN_NBYTES = 1 << 24
_KEPT_LINES = 1024


class TsvFile:
    """A file that is read from any line; memory holds 8 bytes for every 1024 lines. Its lines are
    counted when they are first asked for, one pass over the file. Thread-safe."""

    def __init__(self, path: str | Path) -> None:
        """Raises InvalidJob: there is no such file."""
        self._path = Path(path)
        if not self._path.is_file():
            raise InvalidJob(f"Criteo's data: there is no file {str(path)!r}")

    @property
    def num_records(self) -> int:
        """Lines, of which the last need not end with a line break."""
        return self._index[1]

    def records(self, start: int, stop: int) -> Records:
        """Lines ``[start, stop)``, counted from 0.

        Raises:
            InvalidJob: one of them is no record; names the file, the line as an editor counts, and
                the column.
        """
        offsets, _ = self._index
        with self._path.open("rb") as file:
            file.seek(int(offsets[start // _KEPT_LINES]))
            for _ in range(start % _KEPT_LINES):
                file.readline()
            lines = [file.readline().rstrip(b"\r\n") for _ in range(start, stop)]
        cells = [line.split(b"\t") for line in lines]
        for number, row in enumerate(cells, start=start + 1):
            if len(row) != COLUMNS:
                raise self._bad(number, f"has {len(row)} columns; expected {COLUMNS}")
        label, *rest = zip(*cells, strict=True)
        counts = [
            self._column(start, f"I{i}", cells, _count, "a whole number or nothing")
            for i, cells in enumerate(rest[:NUMERIC], start=1)
        ]
        categories = [
            self._column(start, f"C{i}", cells, _category, "up to 8 hexadecimal digits or nothing")
            for i, cells in enumerate(rest[NUMERIC:], start=1)
        ]
        return Records(
            np.array(self._column(start, "label", label, _label, "0 or 1"), np.int8),
            np.ascontiguousarray(np.array(counts, np.float32).T),
            np.ascontiguousarray(np.array(categories, np.int64).T),
        )

    def fingerprint(self) -> str:
        """Of what the file holds; see :class:`worker.data.source.DataSource`."""
        digest = hashlib.sha256()
        hash_file(self._path, digest)
        return digest.hexdigest()[:32]

    def _column(
        self,
        start: int,
        name: str,
        cells: Sequence[bytes],
        parse: Callable[[bytes], float],
        expected: str,
    ) -> list[float]:
        found: list[float] = []
        try:
            found.extend(parse(cell) for cell in cells)
        except ValueError:
            shown = cells[len(found)].decode(errors="replace")[:40]
            number = start + 1 + len(found)
            raise self._bad(number, f"has {name} {shown!r}; expected {expected}") from None
        return found

    def _bad(self, number: int, why: str) -> InvalidJob:
        return InvalidJob(f"{str(self._path)!r} line {number} {why}")

    @cached_property
    def _index(self) -> tuple[npt.NDArray[np.int64], int]:
        """Where every 1024th line begins, and how many lines there are."""
        kept: list[npt.NDArray[np.int64]] = [np.zeros(1, np.int64)]
        lines, offset, last = 0, 0, b"\n"
        with self._path.open("rb") as file:
            while data := file.read(_SCAN_NBYTES):
                breaks = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
                kept.append(offset + 1 + breaks[-(lines + 1) % _KEPT_LINES :: _KEPT_LINES])
                lines += len(breaks)
                offset += len(data)
                last = data[-1:]
        return np.concatenate(kept), lines + (last != b"\n")


def _label(cell: bytes) -> int:
    return (b"0", b"1").index(cell)


def _count(cell: bytes) -> float:
    return int(cell) if cell else math.nan


def _category(cell: bytes) -> int:
    if not cell:
        return MISSING
    value = int(cell, 16)
    if not 0 <= value <= 0xFFFFFFFF:
        raise ValueError
    return value


def lines(records: Records) -> Iterator[str]:
    """Records as such a file has them, each with its line break."""
    for label, numeric, categorical in zip(
        records.labels.tolist(),
        records.numeric.tolist(),
        records.categorical.tolist(),
        strict=True,
    ):
        counts = ["" if count != count else f"{count:.0f}" for count in numeric]
        values = ["" if value == MISSING else f"{value:08x}" for value in categorical]
        yield "\t".join([str(label), *counts, *values]) + "\n"
