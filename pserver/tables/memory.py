"""Arrays that grow without a copy."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

NDArray = npt.NDArray[Any]

_PAGE = mmap.PAGESIZE
_HUGE_PAGE = 2 << 20
_HUGE_FROM = 8 * _HUGE_PAGE
"""Bytes from which a column asks for huge pages: the last one then wastes at most an eighth."""

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Without MAP_NORESERVE untouched pages would count as memory; columns have more room than rows."""


class Column:
    """One row per slot, all zeros at first, ``[capacity]`` or ``[capacity, width]``.

    The kernel moves the pages (mremap), so growing copies nothing, and untouched pages take no
    memory. Rows begin on a 64-byte boundary where their size allows it.

    Not thread-safe. Use a view from :meth:`rows` within one call only: while a view lives, growing
    copies, and the view keeps showing the old memory.
    """

    def __init__(self, dtype: npt.DTypeLike, width: int | None = None) -> None:
        self._dtype = np.dtype(dtype)
        self._width = width
        self.row_nbytes = self._dtype.itemsize * (width or 1)
        """Bytes of one row."""
        self.capacity = 0
        """Rows that fit."""
        self._memory = self._mapped(_PAGE)

    @property
    def page_rows(self) -> int:
        """Upper bound of the rows that one write makes resident; fewer if the kernel has no huge
        page to give."""
        page = _HUGE_PAGE if len(self._memory) >= _HUGE_FROM else _PAGE
        return page // self.row_nbytes

    def reserve(self, rows: int) -> None:
        """Makes room for at least ``rows`` rows; new ones are zeros.

        Raises:
            OSError: the kernel grants no more address space; the column is unchanged.
        """
        if rows <= self.capacity:
            return
        have, need = len(self._memory), rows * self.row_nbytes
        self._resize(_rounded(max(need, 2 * have)))

    def rows(self) -> NDArray:
        """Returns a view of all rows."""
        flat: NDArray = np.frombuffer(self._memory, self._dtype, self.capacity * (self._width or 1))
        return flat if self._width is None else flat.reshape(self.capacity, self._width)

    def _resize(self, nbytes: int) -> None:
        try:
            self._memory.resize(nbytes)
        except (BufferError, SystemError):
            # A view is alive, perhaps in a traceback; or the system cannot remap.
            old = self._memory
            self._memory = self._mapped(nbytes)
            np.frombuffer(self._memory, np.uint8, len(old))[:] = np.frombuffer(old, np.uint8)
        self._advise(self._memory)
        self.capacity = nbytes // self.row_nbytes

    def _mapped(self, nbytes: int) -> mmap.mmap:
        memory = mmap.mmap(-1, nbytes, flags=_FLAGS)
        self.capacity = nbytes // self.row_nbytes
        return memory

    def _advise(self, memory: mmap.mmap) -> None:
        if len(memory) >= _HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
            # Random accesses miss the TLB far less often; a refusal costs nothing.
            memory.madvise(mmap.MADV_HUGEPAGE)


def _rounded(nbytes: int) -> int:
    unit = _HUGE_PAGE if nbytes >= _HUGE_PAGE else _PAGE
    return -(-nbytes // unit) * unit


def scatter(rows: NDArray, slots: NDArray, values: NDArray) -> None:
    """Performs ``rows[slots] = values`` for contiguous ``[n, width]`` arrays of one dtype and
    distinct slots, with one move per row instead of a loop over its elements."""
    whole = np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))
    rows.view(whole)[:, 0][slots] = np.ascontiguousarray(values).view(whole)[:, 0]
