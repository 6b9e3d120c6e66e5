"""The command streams of the shards: one bounded queue per stream that is open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from coordinator.work import Command, Ended
from psrpc.errors import ResourceExhausted

QUEUE = 64
"""Commands that a stream may lag behind; a slower one is cut and must connect again."""


class _Stream:
    def __init__(self, missed: Sequence[Command]) -> None:
        self.queue: asyncio.Queue[Command | None] = asyncio.Queue()
        self.overrun = False
        for command in missed:
            self.queue.put_nowait(command)

    def put(self, command: Command | None) -> None:
        if self.queue.qsize() >= QUEUE + 1:
            self.overrun = True
        if not self.overrun:
            self.queue.put_nowait(command)


class CommandStreams:
    """Sends commands to whichever shards have a stream open. Loses nothing for the others,
    because whoever opens a stream says what its shard has missed. Used from one event loop."""

    def __init__(self, shards: int) -> None:
        self._streams: list[_Stream | None] = [None] * shards
        self._told = [False] * shards

    def told(self, shard: int) -> bool:
        """Whether the shard has been handed the word that the job is over."""
        return self._told[shard]

    def send(self, command: Command) -> None:
        """To every shard."""
        for stream in self._streams:
            if stream is not None:
                stream.put(command)

    async def stream(self, shard: int, missed: Sequence[Command]) -> AsyncIterator[Command]:
        """The commands for ``shard`` from now on, after those in ``missed``, until the job is
        over. A newer stream of the same shard ends this one.

        Raises:
            ResourceExhausted: the reader is too slow; it has to connect again.
        """
        stream = _Stream(missed)
        older, self._streams[shard] = self._streams[shard], stream
        if older is not None:
            older.put(None)
        try:
            while True:
                command = await stream.queue.get()
                if command is None:
                    return
                yield command
                if isinstance(command, Ended):
                    # The reader has come back for more, so it has got this one.
                    self._told[shard] = True
                    return
                if stream.overrun and stream.queue.empty():
                    raise ResourceExhausted(f"shard {shard} lags {QUEUE} commands behind")
        finally:
            if self._streams[shard] is stream:
                self._streams[shard] = None
