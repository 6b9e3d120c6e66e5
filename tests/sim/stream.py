"""A stream of messages between two processes, which may break."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from psrpc.core.errors import PsError, Unreachable
from tests.sim.network import Network
from tests.sim.schedule import Effect, Process, Waiter


class Stream:
    """A stream of messages from ``sender`` to ``reader``, in order, until it breaks."""

    def __init__(self, network: Network, sender: Process, reader: Process) -> None:
        self._network = network
        self._sender = sender
        self._reader = reader
        self._arrived: deque[Any] = deque()
        self._waiting: Waiter | None = None
        self._last = 0.0
        self._broken = False
        self._over = False
        self.on_break: Callable[[], None] = lambda: None
        """Called when the sender learns that the reader is gone."""
        sender.at_death(lambda: self.break_off("its sender is gone"))
        reader.at_death(lambda: self.break_off("its reader is gone"))

    def send(self, message: Any) -> None:
        """To the reader; what was sent before arrives before it."""
        network = self._network
        if self._broken:
            return
        half_open = network.faults.strikes("stream half open")
        if half_open or network.faults.strikes("stream broken"):
            self.break_off("the connection broke", half_open)
            return
        self._deliver(message, network.latency(self._sender, self._reader))

    def end(self, error: PsError | None) -> None:
        """The sender ends it, after all that it has sent, with an error or in peace."""
        if not self._broken:
            self._broken = True
            self._deliver(error or Unreachable("the stream has ended"), self._network.latency())

    def receive(self) -> Effect:
        """The next message. Raises Unreachable once the stream has broken."""

        def effect(task: Waiter) -> None:
            if self._arrived:
                self._network.schedule.after(
                    0.0, task.process, task.resume, self._arrived.popleft()
                )
            else:
                self._waiting = task

        return effect

    def cancel(self) -> None:
        """The reader ends it."""
        self.break_off("cancelled")

    def break_off(self, why: str, half_open: bool = False) -> None:
        """Breaks: what is under way is lost, and both sides learn of it; with ``half_open``, one
        of them late."""
        if self._broken:
            return
        self._broken = self._over = True
        network = self._network
        early, late = network.latency(), network.latency()
        if half_open:
            late += network.faults.between(1.0, 15.0)
        if network.schedule.random.random() < 0.5:
            early, late = late, early
        network.schedule.after(early, self._reader, self._arrive, Unreachable(why))
        network.schedule.after(late, self._sender, lambda: self.on_break())

    def _deliver(self, message: Any, latency_s: float) -> None:
        schedule = self._network.schedule
        self._last = max(self._last, schedule.now() + latency_s)
        schedule.after(self._last - schedule.now(), self._reader, self._arrive, message)

    def _arrive(self, message: Any) -> None:
        if self._over and not isinstance(message, Unreachable):
            return
        if self._waiting is not None:
            task, self._waiting = self._waiting, None
            task.resume(message)
        else:
            self._arrived.append(message)
