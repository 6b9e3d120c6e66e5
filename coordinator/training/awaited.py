"""Tells the shards which workers others wait for in ssp mode."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.schedule.ledger import Ledger
from psrpc.core.commands import Command


class AwaitedOrders:
    """Sends each change once; a shard whose stream opens later gets the present state. Not
    thread-safe."""

    def __init__(self, send: Callable[[Command], None]) -> None:
        """``send`` reaches every shard."""
        self._send = send
        self._told = 0

    def begin(self) -> None:
        """Begins a generation, in which shards have heard of no worker."""
        self._told = 0

    def look(self, ledger: Ledger | None) -> None:
        """Tells the shards if others wait for other workers than before."""
        if ledger is None or ledger.awaited_number == self._told:
            return
        awaited = ledger.awaited
        if awaited is not None:
            self._told = awaited.number
            self._send(awaited)

    def missed(self, ledger: Ledger | None) -> list[Command]:
        """Returns the command for a shard that may have missed some."""
        awaited = None if ledger is None else ledger.awaited
        return [awaited] if awaited is not None else []
