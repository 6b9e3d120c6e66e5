"""Network links that can be cut, silenced and made to lose replies."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar, cast

Result = TypeVar("Result")

Target = Callable[[], tuple[str, int] | None]
"""Where a process listens; None if it does not."""

CALL_S = 10.0
CONNECT_S = 2.0


@dataclass
class LinkCounts:
    """Counts of what a link did to its traffic, as proof that a fault took effect.

    Attributes:
        connections: that came about.
        reset: connections that were there when they were cut.
        refused: connections that were not let in.
        swallowed: bytes of replies that were dropped.
        held: bytes, or attempts to connect, that had to wait.
    """

    connections: int = 0
    reset: int = 0
    refused: int = 0
    swallowed: int = 0
    held: int = 0


class Link:
    """A listening port whose connections go on to a process, wherever that is at the moment.

    Made by :meth:`Proxy.link`. All methods but ``address`` and ``counts`` are of the proxy's
    thread, see :meth:`Proxy.do`.
    """

    def __init__(self, target: Target, host: str) -> None:
        self.counts = LinkCounts()
        self.host = host
        self.listener = socket.create_server((host, 0))
        self.address = f"{host}:{self.listener.getsockname()[1]}"
        """Where to connect to."""
        # How many faults want each; they may overlap.
        self._silences = self._swallows = self._refusals = 0
        self.sides: set[_Side] = set()
        self._target = target
        self._connecting: set[asyncio.Task[None]] = set()
        self._audible = asyncio.Event()
        self._audible.set()

    @property
    def connections(self) -> int:
        """Connections that are there."""
        return len(self.sides) // 2

    def reset(self) -> None:
        """Ends all connections with a reset, on both sides."""
        self.counts.reset += self.connections
        for side in tuple(self.sides):
            side.abort()

    @property
    def silent(self) -> bool:
        """Whether nothing passes."""
        return self._silences > 0

    @property
    def swallowing(self) -> bool:
        """Whether replies are dropped."""
        return self._swallows > 0

    def silence(self) -> None:
        """No byte passes any more, in either direction, nor the end of a connection."""
        self._silences += 1
        self._audible.clear()

    def speak(self) -> None:
        """Undoes :meth:`silence`: what was held passes now."""
        self._silences -= 1
        if not self.silent:
            self._audible.set()
            for side in tuple(self.sides):
                side.release()

    def swallow(self) -> None:
        """Requests pass, replies are dropped."""
        self._swallows += 1

    def spit(self) -> None:
        """Undoes :meth:`swallow`; streams have a hole now, so all connections are reset."""
        self._swallows -= 1
        self.reset()

    def refuse(self) -> None:
        """Ends all connections, and lets none in."""
        self._refusals += 1
        self.reset()

    def welcome(self) -> None:
        """Undoes :meth:`refuse`."""
        self._refusals -= 1

    def accept(self) -> asyncio.Protocol:
        """The near side of a new connection."""
        return _Side(self, forth=True, target=self._target)

    def accept_at(self, port: int) -> asyncio.Protocol:
        """The same of a connection to another port of the process."""

        def target() -> tuple[str, int] | None:
            found = self._target()
            return None if found is None else (found[0], port)

        return _Side(self, forth=True, target=target)

    def connect(self, near: _Side, target: Target) -> None:
        """Finds the far side of a new connection."""
        task = asyncio.create_task(self._connect(near, target))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, near: _Side, find: Target) -> None:
        if self.silent:
            self.counts.held += 1
            await self._audible.wait()
        target = None if self._refusals else find()
        if target is not None:
            loop = asyncio.get_running_loop()
            with contextlib.suppress(OSError):
                async with asyncio.timeout(CONNECT_S):
                    await loop.create_connection(
                        lambda: _Side(self, forth=False, peer=near), *target
                    )
                self.counts.connections += 1
                return
        self.counts.refused += 1
        near.abort()


class _Side(asyncio.Protocol):
    """One end of a connection through the proxy; what comes in here goes out at ``peer``."""

    def __init__(
        self,
        link: Link,
        *,
        forth: bool,
        peer: _Side | None = None,
        target: Target = lambda: None,
    ) -> None:
        self._link = link
        self._target = target
        self._forth = forth
        self.peer = peer
        self._held = bytearray()
        self._finished = False
        self._lost = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.get_extra_info("socket").setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
        )
        if self.peer is None:
            self._transport.pause_reading()
            self._link.connect(self, self._target)
            return
        if self.peer._lost:
            self.abort()
            return
        self.peer.peer = self
        self._link.sides |= {self, self.peer}
        assert self.peer._transport is not None
        self.peer._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._link.silent:
            self._link.counts.held += len(data)
            self._held += data
        elif self._link.swallowing and not self._forth:
            self._link.counts.swallowed += len(data)
        else:
            assert self.peer is not None
            assert self.peer._transport is not None
            self.peer._transport.write(data)

    def eof_received(self) -> bool:
        """Whether this side stays open."""
        self._finished = True
        if self._link.silent:
            self._link.counts.held += 1
        return self._link.silent

    def pause_writing(self) -> None:
        if self.peer is not None and self.peer._transport is not None and not self.peer._lost:
            self.peer._transport.pause_reading()

    def resume_writing(self) -> None:
        if self.peer is not None and self.peer._transport is not None and not self.peer._lost:
            self.peer._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self.peer is None:
            return
        if self._link.silent:
            # Neither end learns of it for now.
            self._link.counts.held += 1
            return
        self._part(exc)

    def release(self) -> None:
        """The link is no longer silent."""
        if self._held:
            data = bytes(self._held)
            self._held.clear()
            self.data_received(data)
        if self._lost:
            self._part(None)
        elif self._finished and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Ends this side with a reset."""
        if self._transport is None or self._lost:
            self._link.sides.discard(self)
            return
        one = self._transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()
        self._link.sides.discard(self)

    def _part(self, exc: Exception | None) -> None:
        """Ends the other side as this one has ended."""
        self._link.sides.discard(self)
        peer = self.peer
        if peer is None or peer._lost or peer._transport is None:
            return
        if exc is not None:
            peer.abort()
        else:
            peer._transport.close()


class Proxy:
    """All links of one cluster, moved by one thread. Use it with ``with``."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def link(self, target: Target, host: str = "127.0.0.1") -> Link:
        """A new link; ``target``, asked at each connection, says where the process listens."""

        async def make() -> Link:
            link = Link(target, host)
            server = await asyncio.get_running_loop().create_server(link.accept, sock=link.listener)
            self._servers.append(server)
            return link

        return self._wait(make())

    def widen(self, link: Link, port: int) -> None:
        """Has ``link`` lead to another port of its process, too, at the same port of its own host.
        Where that is taken, no connection comes about."""

        async def listen() -> None:
            with contextlib.suppress(OSError):
                server = await asyncio.get_running_loop().create_server(
                    lambda: link.accept_at(port), link.host, port
                )
                self._servers.append(server)

        self._wait(listen())

    def do(self, call: Callable[[], Result]) -> Result:
        """Runs ``call`` in the proxy's thread."""

        async def run() -> Result:
            return call()

        return self._wait(run())

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
