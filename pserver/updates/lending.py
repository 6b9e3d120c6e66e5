"""Arrays that are read by others while they are being updated: copied on write, and only then."""

from __future__ import annotations

import weakref

import numpy as np

from pserver.updates.engine import NDArray
from psrpc.core.plan import aligned_empty


class Lending:
    """Which arrays somebody still reads. Not thread-safe, but readers may let go on any thread."""

    def __init__(self) -> None:
        self._lent: dict[int, weakref.ref[NDArray]] = {}
        """By ``id`` of an array: the last view of it that was given away."""

    def lend(self, array: NDArray) -> NDArray:
        """A read-only view. As long as it lives, or a part of it, updates write elsewhere."""
        lent = self._lent.get(id(array))
        view = None if lent is None else lent()
        if view is None:
            # Not a plain view: parts of one would keep the array alive and not the view.
            view = np.frombuffer(array.data.toreadonly(), array.dtype)
            self._lent[id(array)] = weakref.ref(view)
        return view

    def own(self, array: NDArray) -> NDArray:
        """Where the next values of ``array`` go: into it, or, while somebody still reads it, into
        a new one, uninitialised."""
        lent = self._lent.pop(id(array), None)
        if lent is None or lent() is None:
            return array
        return aligned_empty(len(array), array.dtype.name)

    def clear(self) -> None:
        """Others own the arrays from now on."""
        self._lent.clear()
