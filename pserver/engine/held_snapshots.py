"""Takes each ordered snapshot once, passes it to the sink, and keeps it if workers will pull it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple, Protocol

from pserver.core.requests import Snapshot, Values
from pserver.engine.parameters import Parameters
from pserver.tables.tables import FrozenTables
from psrpc.core.commands import SnapshotOrder
from psrpc.core.errors import RoundPassed

MAX_KEPT = 3
"""Maximum number of kept snapshots."""

_REMEMBERED = 64


class SnapshotSink(Protocol):
    """Receives ordered snapshots. Implementations must not block; calls are serialized."""

    def begun(self, generation: int) -> None:
        """Starts ``generation``: pending work of older generations can be dropped."""

    def taken(self, order: SnapshotOrder, snapshot: Snapshot) -> None:
        """Receives the ``snapshot`` that ``order`` asked for. If ``order.write``, the snapshot has
        its tables, and the sink must close it after writing it or giving it up."""

    def failed(self, order: SnapshotOrder, version: int, reason: str) -> None:
        """Reports that no snapshot could be taken."""

    def repeated(self, order: SnapshotOrder) -> None:
        """Receives an order that was carried out before, so that the sink can report its result
        again."""


class HeldSnapshot(NamedTuple):
    """A kept snapshot. ``tables`` is None if the job has no tables; ``let_go`` releases them."""

    values: Values
    tables: FrozenTables | None
    let_go: Callable[[], None]


class SnapshotShelf:
    """Takes snapshots and keeps some of them to be pulled. Not thread-safe: the engine holds
    ``lock``, which is the shard's."""

    def __init__(self, sink: SnapshotSink, lock: AbstractContextManager[object]) -> None:
        self._sink = sink
        self._lock = lock
        self._kept: dict[str, HeldSnapshot] = {}
        self._seen: dict[str, None] = {}

    def take(self, order: SnapshotOrder, held: Parameters) -> None:
        """Takes the snapshot that ``order`` asks for and passes it, or the error, to the sink. A
        repeated order takes no second snapshot, since the state may have changed."""
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
                # Most likely out of memory. The parameters are intact, and the coordinator waits
                # for a report.
                self._sink.failed(order, held.version, repr(error))
                return
            keep = write = _nothing
            if snapshot.tables is not None:
                freeze = Freeze(snapshot.tables, self._lock)
                # This holder stays until the others have been added. Without it, releasing one of
                # them early could close the tables.
                done = freeze.hold()
                keep = freeze.hold() if order.keep else _nothing
                write = freeze.hold() if order.write else _nothing
                done()
            if order.keep:
                self._kept[order.name] = HeldSnapshot(snapshot.values, snapshot.tables, keep)
            if snapshot.tables is not None:
                tables = snapshot.tables if order.write else None
                snapshot = replace(snapshot, tables=tables, lock=self._lock, let_go=write)
            self._sink.taken(order, snapshot)

    def begin(self, generation: int) -> None:
        """Drops all snapshots and remembered orders, since their names may recur in this
        generation."""
        for name in list(self._kept):
            self.release(name)
        self._seen.clear()
        self._sink.begun(generation)

    def get(self, name: str) -> HeldSnapshot:
        """Returns a kept snapshot.

        Raises:
            RoundPassed: no snapshot of that name is kept, or no longer.
        """
        if name not in self._kept:
            kept = ", ".join(self._kept) or "none"
            raise RoundPassed(f"no snapshot {name!r} is kept; kept are: {kept}")
        return self._kept[name]

    def release(self, name: str) -> None:
        """Releases a kept snapshot; ignores a name that is not kept."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            kept.let_go()


def _nothing() -> None:
    """Releases nothing."""


class Freeze:
    """The tables of one moment, closed when the last holder releases them.

    ``lock`` is the shard's and reentrant. Releasing takes it; callers of :meth:`hold` and readers
    of the tables must hold it.
    """

    def __init__(self, tables: FrozenTables, lock: AbstractContextManager[object]) -> None:
        self.tables = tables
        self.lock = lock
        self._holders = 0

    def hold(self) -> Callable[[], None]:
        """Adds a holder. Returns the function that releases it, which may be called repeatedly."""
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
