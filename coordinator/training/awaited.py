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
        """Sends the shards the workers that others wait for, if these have changed."""
        clocks = None if ledger is None else ledger.clocks
        if clocks is not None and clocks.number != self._told:
            self._told = clocks.number
            self._send(clocks.awaited)

    def missed(self, ledger: Ledger | None) -> list[Command]:
        """Returns the present state, as a command, for a shard that may have missed changes."""
        clocks = None if ledger is None else ledger.clocks
        return [clocks.awaited] if clocks is not None else []
