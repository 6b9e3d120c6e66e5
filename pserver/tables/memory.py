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
"""Size from which a column asks for huge pages. The last huge page then wastes at most an eighth of
the memory."""

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
"""MAP_NORESERVE, because columns have room for more rows than they contain, and without it the
kernel would count untouched pages as used memory."""


class Column:
    """An array with one row per slot, ``[capacity]`` or ``[capacity, width]``, initially zeros. Not
    thread-safe.

    To grow, it lets the kernel move the pages (mremap), which copies nothing; untouched pages take
    no memory. Rows begin on a 64-byte boundary if their size is a multiple of that.

    Do not keep a view from :meth:`rows` longer than one call: while a view exists, growing has to
    copy, and the view then still shows the old memory.
    """

    def __init__(self, dtype: npt.DTypeLike, width: int | None = None) -> None:
        self._dtype = np.dtype(dtype)
        self._width = width
        self.row_nbytes = self._dtype.itemsize * (width or 1)
        """Bytes of one row."""
        self.capacity = 0
        """Number of rows that fit."""
        self._memory = self._mapped(_PAGE)

    @property
    def page_rows(self) -> int:
        """Maximum number of rows that become resident when one row is written. It is less if the
        kernel has no free huge page."""
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
            # A view still exists, perhaps in a traceback, or the system cannot remap. Copies
            # instead.
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
            # With huge pages, random accesses miss the TLB far less often. The kernel may ignore
            # the advice.
            memory.madvise(mmap.MADV_HUGEPAGE)


def _rounded(nbytes: int) -> int:
    unit = _HUGE_PAGE if nbytes >= _HUGE_PAGE else _PAGE
    return -(-nbytes // unit) * unit


def scatter(rows: NDArray, slots: NDArray, values: NDArray) -> None:
    """Performs ``rows[slots] = values`` for contiguous ``[n, width]`` arrays of one dtype and
    distinct slots, with one move per row instead of a loop over its elements."""
    whole = np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))
    rows.view(whole)[:, 0][slots] = np.ascontiguousarray(values).view(whole)[:, 0]
