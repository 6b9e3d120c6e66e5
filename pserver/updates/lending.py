"""Lends arrays to snapshots while updates continue in other memory."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from psrpc.core.plan import aligned_empty
from psrpc.ops.logs import get_logger
from psrpc.ops.threads import THREADS

NDArray = npt.NDArray[Any]

SMALL_NBYTES = 4 << 20
"""For less memory than this a thread is not worth its cost: the first write to it takes only some
milliseconds."""

_PAGE_NBYTES = 4096

log = get_logger()


class Spares:
    """Keeps free arrays in memory that has been written before. Thread-safe.

    The kernel allocates a page at the first write to it. On a virtual machine that takes 4 to 20
    µs, since the host may have to allocate it, too: more than a second for the state of 100 MB of
    parameters with Adam. So a thread writes to the memory of the first snapshot ahead of time, and
    later snapshots reuse the memory of earlier ones."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, str], list[NDArray]] = {}
        self._wanted: Counter[tuple[int, str]] = Counter()
        """Length and dtype -> number of such arrays in one snapshot. Further free arrays are not
        kept."""
        self._held: dict[int, weakref.ref[NDArray]] = {}
        """``id`` of a lent view -> a reference to the view, which frees the array when the view is
        gone."""

    def prepare(self, sizes: Iterable[tuple[int, str]]) -> None:
        """Starts to make the arrays of one snapshot, by length and dtype, in the background."""
        self._wanted = Counter(sizes)
        total = sum(n * np.dtype(dtype).itemsize * k for (n, dtype), k in self._wanted.items())
        if total >= SMALL_NBYTES:
            THREADS.thread(self._fill, "spares").start()

    def take(self, length: int, dtype: str) -> NDArray:
        """Returns a ``[length]`` array with undefined contents; a new one if none is free."""
        try:
            return self._free[length, dtype].pop()
        except (KeyError, IndexError):
            return aligned_empty(length, dtype)

    def lend(self, array: NDArray) -> NDArray:
        """Returns a read-only view of ``array``, which becomes free when the view is gone."""
        view = read_only(array)
        self.free_after(view, array)
        return view

    def free_after(self, view: NDArray, array: NDArray) -> None:
        """Makes ``array`` free when ``view``, which :func:`read_only` made of it, is gone."""
        key = id(view)

        # Takes no lock: Python may run this in any thread, even in the middle of a method of this
        # object.
        def ended(_ended: weakref.ref[NDArray]) -> None:
            self._held.pop(key, None)
            self._put(array)

        self._held[key] = weakref.ref(view, ended)

    def _put(self, array: NDArray) -> None:
        size = len(array), array.dtype.name
        free = self._free.setdefault(size, [])
        if len(free) < self._wanted[size]:
            free.append(array)

    def _fill(self) -> None:
        try:
            for (length, dtype), count in self._wanted.items():
                for _ in range(count - len(self._free.get((length, dtype), ()))):
                    array = aligned_empty(length, dtype)
                    array.view(np.uint8)[::_PAGE_NBYTES] = 0
                    self._put(array)
        except MemoryError:
            # If there is no memory for the first snapshot either, that one reports the error.
            log.warning("no memory was left to prepare the first checkpoint")


class Lending:
    """Tracks the arrays of an engine that have live views. Not thread-safe, but any thread may
    release a view."""

    def __init__(self, spares: Spares | None = None) -> None:
        self._spares = spares or Spares()
        self._lent: dict[int, weakref.ref[NDArray]] = {}
        """``id`` of an array -> its last view."""

    def lend(self, array: NDArray) -> NDArray:
        """Returns a read-only view of ``array``. While the view or a part of it lives, updates
        write to another array."""
        lent = self._lent.get(id(array))
        view = None if lent is None else lent()
        if view is None:
            view = read_only(array)
            self._lent[id(array)] = weakref.ref(view)
        return view

    def own(self, array: NDArray) -> NDArray:
        """Returns the array to write the next values of ``array`` to: ``array`` itself, or while a
        view of it lives another array with undefined contents."""
        lent = self._lent.pop(id(array), None)
        view = None if lent is None else lent()
        if view is None:
            return array
        self._spares.free_after(view, array)
        return self._spares.take(len(array), array.dtype.name)

    def clear(self) -> None:
        """Forgets all arrays, because the engine no longer owns them."""
        self._lent.clear()


def read_only(array: NDArray) -> NDArray:
    """Returns a view of ``array`` that stays alive as long as any slice of the view.

    A plain view would not: its slices would refer to ``array`` instead, so a weak reference could
    not tell that slices are still in use."""
    return np.frombuffer(array.data.toreadonly(), array.dtype)
