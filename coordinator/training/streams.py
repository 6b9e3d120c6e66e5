"""The command streams of the shards: one bounded queue per stream that is open."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence

from psrpc.core.commands import Command, Ended
from psrpc.core.errors import ResourceExhausted

QUEUE = 64
"""Commands that a stream may lag behind; a slower one is cut and must reconnect."""

FOREVER_S = 3600.0
"""Wait of an idle stream; its caller's deadline ends it long before."""


class Stream:
    """The commands for one process in a shard's place, in order. Take them with :meth:`next`, or
    iterate in an event loop. Not thread-safe."""

    def __init__(self, shard: int, incarnation: int, missed: Sequence[Command]) -> None:
        self.shard = shard
        self.incarnation = incarnation
        self.over = False
        """Whether no more commands will come."""
        self.told = False
        """Whether its reader has received the end of the job."""
        self._queue: deque[Command] = deque(missed)
        self._overrun = False
        self._replaced = False
        self._bell = Notifier()

    def put(self, command: Command) -> None:
        """Appends a command."""
        if len(self._queue) >= QUEUE:
            self._overrun = True
        if not self._overrun:
            self._queue.append(command)
        self._bell.ring()

    def end(self) -> None:
        """Ends the stream, since a newer stream or another process replaces it; drops its unread
        commands."""
        self._replaced = True
        self._bell.ring()

    def next(self) -> Command | None:
        """Returns the next command, or None if there is none now; see ``over``.

        Raises:
            ResourceExhausted: the reader is too slow; it has to reconnect.
        """
        if self._replaced or self.over:
            self.over = True
            return None
        if self._queue:
            return self._queue.popleft()
        if self._overrun:
            self.over = True
            raise ResourceExhausted(f"shard {self.shard} lags {QUEUE} commands behind")
        return None

    async def __aiter__(self) -> AsyncIterator[Command]:
        while True:
            command = self.next()
            if command is None:
                if self.over:
                    return
                await self._bell.wait(asyncio.get_running_loop().time() + FOREVER_S)
                continue
            yield command
            if isinstance(command, Ended):
                # The reader has come back for more, so it has received this one.
                self.told = self.over = True
                return


class CommandStreams:
    """Sends commands to the shards with an open stream. The others lose nothing, since a stream
    begins with the commands that its shard has missed. Not thread-safe."""

    def __init__(self, shards: int) -> None:
        self._streams: list[Stream | None] = [None] * shards

    def send(self, command: Command) -> None:
        """Sends a command to every shard."""
        for shard in range(len(self._streams)):
            self.send_to(shard, command)

    def send_to(self, shard: int, command: Command) -> None:
        """Sends a command to one shard."""
        stream = self._streams[shard]
        if stream is not None:
            stream.put(command)

    def open(self, shard: int, incarnation: int, missed: Sequence[Command]) -> Stream:
        """Opens a stream of ``missed`` and later commands for ``shard``; ends an older one."""
        self.end(shard)
        stream = self._streams[shard] = Stream(shard, incarnation, missed)
        return stream

    def end(self, shard: int) -> None:
        """Ends the stream of a shard, if there is one."""
        older, self._streams[shard] = self._streams[shard], None
        if older is not None:
            older.end()

    def close(self, stream: Stream) -> bool:
        """Closes a stream that its reader ended; returns whether it was the shard's newest."""
        if self._streams[stream.shard] is not stream:
            return False
        self._streams[stream.shard] = None
        return True


FEW = 16
"""Waiters that are woken at every ring."""

WAITER_S = 50e-6
"""Approximate seconds that a waiter needs to check its condition."""


class Notifier:
    """Wakes many waiters at once, which then check their conditions. Used from one event loop.

    If more than :data:`FEW` wait, rings that come faster than they can check are merged into one.
    Otherwise a thousand parked calls and as many reports a second would leave no time for anything
    else."""

    def __init__(self) -> None:
        self._event: asyncio.Event | None = None
        self._waiters = 0
        self._rang = -math.inf
        self._later: asyncio.TimerHandle | None = None

    def ring(self) -> None:
        """Wakes all present waiters, now or shortly."""
        if self._event is None or self._later is not None:
            return
        if self._waiters <= FEW:
            self._wake()
            return
        loop = asyncio.get_running_loop()
        due = self._rang + self._waiters * WAITER_S
        if loop.time() >= due:
            self._rang = loop.time()
            self._wake()
        else:
            self._later = loop.call_at(due, self._wake_later)

    def _wake_later(self) -> None:
        self._later, self._rang = None, asyncio.get_running_loop().time()
        self._wake()

    def _wake(self) -> None:
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self, deadline: float) -> bool:
        """Waits for a ring until ``deadline`` (in the loop's time); returns whether one came."""
        if self._event is None:
            self._event = asyncio.Event()
        self._waiters += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self._event.wait()
        except TimeoutError:
            return False
        finally:
            self._waiters -= 1
        return True
