"""Which connection of a small server gives way to a new one."""

from __future__ import annotations

from collections.abc import Hashable


class Seats:
    """At most ``most`` connections, ``most_of_one`` of them from one address. Not thread-safe.

    A new one always gets its seat, so clients that connect and say nothing keep no others out:
    where none is free, the oldest gives way that has not asked for anything yet; where all have
    asked, the oldest of them. An address that has too many loses one of its own.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._seats: dict[Hashable, tuple[str, bool]] = {}
        """Address and whether it has asked, by connection, oldest first."""

    def __len__(self) -> int:
        return len(self._seats)

    def take(self, connection: Hashable, address: str) -> Hashable | None:
        """A new connection; which one has to be closed for it, and has no seat any more, if any."""
        mine = [one for one, (where, _) in self._seats.items() if where == address]
        leaves = None
        if len(mine) >= self._most_of_one:
            leaves = self._first(mine)
        elif len(self._seats) >= self._most:
            leaves = self._first(list(self._seats))
        if leaves is not None:
            del self._seats[leaves]
        self._seats[connection] = (address, False)
        return leaves

    def asked(self, connection: Hashable) -> None:
        """Its request is here."""
        if connection in self._seats:
            address, _ = self._seats[connection]
            self._seats[connection] = (address, True)

    def leave(self, connection: Hashable) -> None:
        """It is over; may be said of one that had to give way."""
        self._seats.pop(connection, None)

    def _first(self, among: list[Hashable]) -> Hashable:
        return next((one for one in among if not self._seats[one][1]), among[0])
