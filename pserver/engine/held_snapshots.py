"""Snapshots on order: taken once each, handed on, and kept for ``Pull`` where the order says so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple, Protocol

from pserver.core.requests import Snapshot, SnapshotOrder, Values
from pserver.engine.parameters import Parameters
from pserver.tables.tables import FrozenTables
from psrpc.core.errors import RoundPassed

MAX_KEPT = 3
"""Snapshots that are kept at once."""

_REMEMBERED = 64


class SnapshotSink(Protocol):
    """Where snapshots go that were ordered; does not block. Calls come one after another."""

    def begun(self, generation: int) -> None:
        """All that follows is of ``generation``; what is still to be done for an older one is
        of no use any more."""

    def taken(self, order: SnapshotOrder, snapshot: Snapshot) -> None:
        """``snapshot`` was taken by ``order``. If that is to be written, the snapshot has its
        tables, and has to be closed after that, or when it turns out that it will not be."""

    def failed(self, order: SnapshotOrder, version: int, reason: str) -> None:
        """No snapshot could be taken."""

    def repeated(self, order: SnapshotOrder) -> None:
        """The order was carried out before; what came of it may have to be told again."""


class Kept(NamedTuple):
    """A snapshot to be read from; ``tables`` if the job has some."""

    values: Values
    tables: FrozenTables | None
    let_go: Callable[[], None]


class SnapshotShelf:
    """Not thread-safe: the shard's engine holds its ``lock``."""

    def __init__(self, sink: SnapshotSink, lock: AbstractContextManager[object]) -> None:
        self._sink = sink
        self._lock = lock
        self._kept: dict[str, Kept] = {}
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
            keep = write = _nothing
            if snapshot.tables is not None:
                freeze = Freeze(snapshot.tables, self._lock)
                # One claim until everybody has theirs, so that nobody's end is the last too soon.
                done = freeze.hold()
                keep = freeze.hold() if order.keep else _nothing
                write = freeze.hold() if order.write else _nothing
                done()
            if order.keep:
                self._kept[order.name] = Kept(snapshot.values, snapshot.tables, keep)
            if snapshot.tables is not None:
                tables = snapshot.tables if order.write else None
                snapshot = replace(snapshot, tables=tables, lock=self._lock, let_go=write)
            self._sink.taken(order, snapshot)

    def begin(self, generation: int) -> None:
        """Forgets all snapshots and all orders: those of another generation mean other ones."""
        for name in list(self._kept):
            self.release(name)
        self._seen.clear()
        self._sink.begun(generation)

    def get(self, name: str) -> Kept:
        """A kept snapshot.

        Raises:
            RoundPassed: none of that name is kept, any more.
        """
        if name not in self._kept:
            kept = ", ".join(self._kept) or "none"
            raise RoundPassed(f"no snapshot {name!r} is kept; kept are: {kept}")
        return self._kept[name]

    def release(self, name: str) -> None:
        """Forgets a snapshot; one that is not kept is no error."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            kept.let_go()


def _nothing() -> None:
    """What lets go of nothing."""


class Freeze:
    """Tables as they were at one moment, closed by the last of those who hold them.

    Thread-safe by ``lock``, which is the shard's: the tables change under it, and may only be read
    under it. It may be taken again by a thread that has it.
    """

    def __init__(self, tables: FrozenTables, lock: AbstractContextManager[object]) -> None:
        self.tables = tables
        self.lock = lock
        self._holders = 0

    def hold(self) -> Callable[[], None]:
        """One more who reads them. Returns what lets go of them again; more than once is no
        error."""
        self._holders += 1
        held = True

        def let_go() -> None:
            nonlocal held
            with self.lock:
                if held:
                    held = False
                    self._holders -= 1
                    if not self._holders:
                        self.tables.close()

        return let_go
