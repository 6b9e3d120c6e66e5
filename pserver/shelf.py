"""The snapshots that a shard keeps for ``Pull``, and which orders for one it has seen."""

from __future__ import annotations

from pserver.requests import SnapshotOrder, Values
from psrpc.errors import InvalidArgument, ResourceExhausted

MAX_KEPT = 3
"""Snapshots that are kept at once."""

_REMEMBERED = 64


class SnapshotShelf:
    """Kept snapshots by name. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[str, Values] = {}
        self._seen: dict[str, None] = {}

    def first_time(self, order: SnapshotOrder) -> bool:
        """Whether ``order`` is new. Orders may be repeated and are carried out once."""
        if order.name in self._seen:
            return False
        self._seen[order.name] = None
        if len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        return True

    def check_room(self, order: SnapshotOrder) -> None:
        """Raises ResourceExhausted when ``order`` cannot be kept as it says."""
        if order.keep and len(self._kept) >= MAX_KEPT:
            raise ResourceExhausted(
                f"snapshot {order.name} cannot be kept: {', '.join(self._kept)} are;"
                f" expected at most {MAX_KEPT}"
            )

    def put(self, order: SnapshotOrder, values: Values) -> None:
        """Keeps ``values`` if ``order`` says so."""
        if order.keep:
            self._kept[order.name] = values

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
