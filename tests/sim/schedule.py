"""One seeded order of events in simulated time, and the processes that they happen to."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Generator
from random import Random
from typing import Any, Protocol, TypeAlias

from psrpc.core.errors import PsError
from psrpc.ops.clock import ManualClock

Effect: TypeAlias = "Callable[[Waiter], None]"
"""What a thread waits for: it arranges for ``resume`` to be called later."""

Steps: TypeAlias = Generator[Effect, Any, Any]


MOST_AT_ONCE = 10_000
"""Events of one simulated instant; there are some hundreds when a cluster goes well."""


class Livelock(Exception):
    """Things happen without end at one instant: time does not go on."""


class Waiter(Protocol):
    """A thread of a process that waits for an effect."""

    process: Process

    def resume(self, value: Any) -> None:
        """The effect has come to ``value``; an error is raised where it was waited for."""


class Crash(BaseException):
    """The process dies here, in the middle of what it does."""


class Process:
    """One start of a process. A dead one does nothing more; a paused one does later, believing
    what it believed, what it would have done meanwhile."""

    def __init__(self, schedule: Schedule, name: str, incarnation: int) -> None:
        self.schedule = schedule
        self.name = name
        self.incarnation = incarnation
        self.alive = True
        self.paused = False
        self._deferred: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._at_death: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"{self.name}#{self.incarnation}"

    def spawn(self, steps: Steps, ended: Callable[[Any], None] | None = None) -> None:
        """Begins a thread of this process; ``ended`` gets its result or its error."""
        task = Task(self, steps, ended)
        self.schedule.after(0.0, self, task.resume, None)

    def at_death(self, function: Callable[[], None]) -> None:
        """``function`` is called when the process has died or ended."""
        self._at_death.append(function)

    def kill(self) -> None:
        """The process is gone, at once and for good."""
        if self.alive:
            self.alive = False
            self._deferred.clear()
            for function in self._at_death:
                function()

    def stop(self) -> None:
        """SIGSTOP."""
        self.paused = True

    def go_on(self) -> None:
        """SIGCONT: what has come due meanwhile happens now, in its order."""
        self.paused = False
        deferred, self._deferred = self._deferred, []
        for function, arguments in deferred:
            self.schedule.after(0.0, self, function, *arguments)

    def do(self, function: Callable[..., None], *arguments: Any) -> None:
        """Something that the process does now, unless it is dead, or paused: then later."""
        if not self.alive:
            return
        if self.paused:
            self._deferred.append((function, arguments))
            return
        try:
            function(*arguments)
        except Crash:
            self.kill()


class Task:
    """One thread of a process: a generator of effects."""

    __slots__ = ("_ended", "_steps", "process")

    def __init__(self, process: Process, steps: Steps, ended: Callable[[Any], None] | None) -> None:
        self.process = process
        self._steps = steps
        self._ended = ended

    def resume(self, value: Any) -> None:
        try:
            if isinstance(value, PsError):
                effect = self._steps.throw(value)
            else:
                effect = self._steps.send(value)
        except StopIteration as stop:
            if self._ended is not None:
                self._ended(stop.value)
            return
        effect(self)


class Schedule:
    """Events in the order of their time; those of one moment in the order they were made in.
    ``random`` is the only source of chance in a run.
    """

    def __init__(self, seed: int, show: Callable[[str], None] | None = None) -> None:
        self.random = Random(seed)
        self.clock = ManualClock()
        self.events = 0
        self._show = show
        self._heap: list[tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]]
        self._heap = []
        self._made = 0
        self._now = 0.0

    def now(self) -> float:
        """Simulated seconds since the start."""
        return self._now

    def after(
        self,
        delay_s: float,
        process: Process | None,
        function: Callable[..., None],
        *arguments: Any,
    ) -> None:
        """Calls ``function`` in ``delay_s`` seconds, as something that ``process`` does."""
        self._made += 1
        heapq.heappush(self._heap, (self._now + delay_s, self._made, process, function, arguments))

    def sleep(self, seconds: float) -> Effect:
        """The effect of doing nothing for a while."""
        return lambda task: self.after(seconds, task.process, task.resume, None)

    def trace(self, *words: object) -> None:
        """Prints an event where traces are wanted."""
        if self._show is not None:
            self._show(f"{self._now:9.3f}  " + " ".join(map(str, words)))

    def digest(self) -> int:
        """A checksum of all that has happened: whatever differs between two runs of one seed
        draws other numbers. Draws one itself."""
        return zlib.crc32(repr((self.random.random(), self.events, self._now)).encode())

    def run(self, over: Callable[[], bool]) -> None:
        """Lets things happen until ``over``, or until nothing can happen any more.

        Raises:
            Livelock: more than :data:`MOST_AT_ONCE` have happened at one instant.
        """
        heap = self._heap
        began = self.events
        while heap and not over():
            at, _, process, function, arguments = heapq.heappop(heap)
            if at > self._now:
                self.clock.advance(at - self._now)
                self._now = self.clock.now()
                began = self.events
            self.events += 1
            if self.events - began > MOST_AT_ONCE:
                raise Livelock(
                    f"more than {MOST_AT_ONCE} events at {self._now:.3f} s and {len(heap)} to "
                    f"come, the last one {function} of {process}"
                )
            if process is None:
                function(*arguments)
            else:
                process.do(function, *arguments)


class Signal:
    """Tasks wait for it; sending it wakes all of them."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._waiting: list[Callable[[], None]] = []

    def wait(self, timeout_s: float | None = None) -> Effect:
        """The effect of waiting for the next :meth:`send`, for ``timeout_s`` at most."""

        def effect(task: Waiter) -> None:
            woken = False

            def wake() -> None:
                nonlocal woken
                if not woken:
                    woken = True
                    task.resume(None)

            self._waiting.append(lambda: self._schedule.after(0.0, task.process, wake))
            if timeout_s is not None:
                self._schedule.after(timeout_s, task.process, wake)

        return effect

    def send(self) -> None:
        """Wakes everybody."""
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()
