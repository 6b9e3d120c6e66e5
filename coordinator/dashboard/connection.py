"""A browser's connection to the dashboard, with a bound on the time that it may be of no use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.h11_impl import H11Protocol


def bounded(patience_s: Callable[[], float], most: int) -> type[H11Protocol]:
    """The protocol of a server that closes a connection on which no answer was completed in time.

    The time runs from the beginning of the connection, and again from each answer that is whole,
    whatever comes meanwhile: who sends nothing, a head or a body byte by byte, or does not read
    what was asked for, is gone after it.

    Args:
        patience_s: that time, in seconds.
        most: connections at once; one more is closed before it has said anything.
    """

    class Connection(H11Protocol):
        _end: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            super().connection_made(transport)
            self._wait()
            if len(self.connections) > most:
                transport.abort()

        def on_response_complete(self) -> None:
            self._wait()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._end is not None:
                self._end.cancel()
            super().connection_lost(exc)

        def _wait(self) -> None:
            if self._end is not None:
                self._end.cancel()
            # Not `close`, which waits until everything has been read.
            self._end = self.loop.call_later(patience_s(), lambda: self.transport.abort())

    return Connection
