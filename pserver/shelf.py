"""Snapshots on order: taken once each, handed on, and kept for ``Pull`` where the order says so."""

from __future__ import annotations

from typing import Protocol

from pserver.parameters import Parameters
from pserver.requests import Snapshot, SnapshotOrder, Values
from psrpc.errors import InvalidArgument

MAX_KEPT = 3
"""Snapshots that are kept at once."""

_REMEMBERED = 64


class SnapshotSink(Protocol):
    """Where snapshots go that were ordered; does not block. Calls come one after another."""

    def begun(self, generation: int) -> None:
        """All that follows is of ``generation``; what is still to be done for an older one is
        of no use any more."""

    def taken(self, order: SnapshotOrder, snapshot: Snapshot) -> None:
        """``snapshot`` was taken by ``order``."""

    def failed(self, order: SnapshotOrder, version: int, reason: str) -> None:
        """No snapshot could be taken."""

    def repeated(self, order: SnapshotOrder) -> None:
        """The order was carried out before; what came of it may have to be told again."""


class SnapshotShelf:
    """Not thread-safe: the shard's engine holds its lock."""

    def __init__(self, sink: SnapshotSink) -> None:
        self._sink = sink
        self._kept: dict[str, Values] = {}
        self._seen: dict[str, None] = {}

    def take(self, order: SnapshotOrder, held: Parameters) -> None:
        """Freezes the present state by ``order`` and tells the sink what came of it.

        An order counts once: it may be repeated, and by then the state is another.
        """
        if order.name in self._seen:
            self._sink.repeated(order)
            return
        self._seen[order.name] = None
        if len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        if held.failure:
            self._sink.failed(order, held.version, held.failure)
        elif not held.initialized:
            self._sink.failed(order, held.version, "the shard has not been initialized")
        elif order.keep and len(self._kept) >= MAX_KEPT:
            kept = ", ".join(self._kept)
            self._sink.failed(
                order, held.version, f"{kept} are kept already; expected at most {MAX_KEPT}"
            )
        else:
            try:
                snapshot = held.snapshot()
            except Exception as error:
                # Most likely memory. The parameters are as they were, and somebody waits.
                self._sink.failed(order, held.version, repr(error))
                return
            if order.keep:
                self._kept[order.name] = snapshot.values
            self._sink.taken(order, snapshot)

    def begin(self, generation: int) -> None:
        """Forgets all snapshots and all orders: those of another generation mean other ones."""
        self._kept.clear()
        self._seen.clear()
        self._sink.begun(generation)

    def get(self, name: str) -> Values:
        """The values of a kept snapshot.

        Raises:
            InvalidArgument: none of that name is kept.
        """
        if name not in self._kept:
            kept = ", ".join(self._kept) or "none"
            raise InvalidArgument(f"no snapshot {name!r} is kept; kept are: {kept}")
        return self._kept[name]

    def release(self, name: str) -> None:
        """Forgets a snapshot; one that is not kept is no error."""
        self._kept.pop(name, None)
