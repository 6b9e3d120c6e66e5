"""Threads of a simulated process: ordinary code, which gives way where it would block."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

from greenlet import (  # type: ignore[import-untyped]
    GreenletExit,
    getcurrent,
    greenlet,
)

from psrpc.core.errors import PsError
from psrpc.ops.threads import Threads
from tests.sim.schedule import Effect, Process, Signal, Steps, Waiter
from worker.protocol.done import Stopped

Result = TypeVar("Result")

EPSILON_S = 1e-6
"""A wait is over if so little of it is left."""

ROLE_ENDS = (PsError, Stopped)
"""Errors that work on a pool may raise for its caller; others are bugs and end the run at once."""


class Fibers(Threads):
    """The threads of one process. Only one goes on at a time, until it waits for something; when
    the process dies they end where they stand."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._schedule = process.schedule
        self._going: dict[_Fiber, None] = {}
        process.at_death(lambda: self._schedule.after(0.0, None, self.end))

    def spawn(self, function: Callable[[], object], ended: Callable[[Any], None]) -> None:
        """Begins a thread; ``ended`` gets what ``function`` returns."""
        fiber = _Fiber(self._process)

        def run(_begin: object) -> None:
            try:
                result = function()
            finally:
                del self._going[fiber]
            ended(result)

        fiber.begin(run)
        self._going[fiber] = None
        self._schedule.after(0.0, self._process, fiber.resume, None)

    def run(self, function: Callable[[], object]) -> Effect:
        """The effect of a thread that does ``function``: it comes to what that returns."""

        def effect(waiter: Waiter) -> None:
            self.spawn(function, partial(self._schedule.after, 0.0, waiter.process, waiter.resume))

        return effect

    def end(self) -> None:
        """Ends all threads, from outside of them."""
        for fiber in list(self._going):
            fiber.end()

    def wait(self, effect: Effect) -> Any:
        """Waits for the result of ``effect``; the calling thread gives way until then."""
        return _wait(effect)

    def follow(self, steps: Steps) -> Any:
        """Runs ``steps``, waits for each, and returns their result."""
        go_on: Callable[[], Effect] = partial(next, steps)
        while True:
            try:
                effect = go_on()
            except StopIteration as stop:
                return stop.value
            try:
                go_on = partial(steps.send, _wait(effect))
            except PsError as error:
                go_on = partial(steps.throw, error)

    def sleep(self, seconds: float) -> None:
        """Does nothing for a while."""
        _wait(self._schedule.sleep(seconds))

    # -- what real code takes ------------------------------------------------------------------

    def thread(self, target: Callable[[], object], name: str) -> threading.Thread:
        return _Thread(self, Signal(self._schedule), target, name)

    def pool(self, workers: int, name: str) -> Executor:
        return _Pool(self, lambda: Signal(self._schedule), workers)

    def event(self) -> threading.Event:
        return _Event(Signal(self._schedule))

    def condition(self) -> threading.Condition:
        return Condition(Signal(self._schedule), self.now)

    def now(self) -> float:
        return self._schedule.now()

    def chance(self) -> float:
        return self._schedule.random.random()


class _Fiber:
    """A :class:`tests.sim.schedule.Waiter`."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._greenlet: Any = None

    def begin(self, run: Callable[[object], None]) -> None:
        """``run`` is done from the first :meth:`resume` on."""
        # The scheduler goes on when this waits or is over.
        hub: Any = getcurrent()
        while hub.parent is not None:
            hub = hub.parent
        self._greenlet = greenlet(run, hub)
        self._greenlet.fiber = self

    def resume(self, value: Any) -> None:
        """Goes on with ``value``, the result it waited for."""
        if not self._greenlet.dead:
            self._greenlet.switch(value)

    def end(self) -> None:
        """It goes no further."""
        self._greenlet.throw()


def _wait(effect: Effect) -> Any:
    current: Any = getcurrent()
    fiber: _Fiber = current.fiber
    if not fiber.process.alive:
        raise GreenletExit
    effect(fiber)
    value = current.parent.switch()
    if isinstance(value, PsError):
        raise value
    return value


class _Event(threading.Event):
    def __init__(self, signal: Signal) -> None:
        self._flag = False
        self._signal = signal

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        self._signal.send()

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._flag:
            _wait(self._signal.wait(timeout))
        return self._flag


class Condition(threading.Condition):
    """No other task goes on while its lock would be held.

    Attributes:
        heard: called at each notification.
    """

    def __init__(self, signal: Signal, now: Callable[[], float]) -> None:
        self.heard: Callable[[], object] = lambda: None
        self._signal = signal
        self._now = now

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        return

    def wait_for(self, predicate: Callable[[], Result], timeout: float | None = None) -> Result:
        until = math.inf if timeout is None else self._now() + timeout - EPSILON_S
        while not (found := predicate()) and (now := self._now()) < until:
            _wait(self._signal.wait(None if timeout is None else until + EPSILON_S - now))
        return found

    def notify(self, n: int = 1) -> None:
        self._signal.send()
        self.heard()

    def notify_all(self) -> None:
        self.notify()


class _Thread(threading.Thread):
    def __init__(
        self, fibers: Fibers, ended: Signal, target: Callable[[], object], name: str
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._fibers = fibers
        self._ended = ended
        self._work = target
        self._over = False

    def start(self) -> None:
        self._fibers.spawn(self._work, self._end)

    def join(self, timeout: float | None = None) -> None:
        if not self._over:
            _wait(self._ended.wait(timeout))

    def is_alive(self) -> bool:
        return not self._over

    def _end(self, _result: object) -> None:
        self._over = True
        self._ended.send()


class _Future(Future[Any]):
    def __init__(self, signal: Signal) -> None:
        super().__init__()
        self._signal = signal

    def result(self, timeout: float | None = None) -> Any:
        self._await(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._await(timeout)
        return super().exception(0)

    def end(self, work: Callable[[], Any]) -> None:
        """Does the work and tells those who wait."""
        try:
            self.set_result(work())
        except ROLE_ENDS as error:
            self.set_exception(error)
        self._signal.send()

    def _await(self, timeout: float | None) -> None:
        if not self.done():
            _wait(self._signal.wait(timeout))


class _Pool(Executor):
    def __init__(self, fibers: Fibers, signal: Callable[[], Signal], workers: int) -> None:
        self._fibers = fibers
        self._signal = signal
        self._free = workers
        self._closed = False
        self._queue: deque[tuple[_Future, Callable[[], Any]]] = deque()
        self._futures: list[_Future] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = _Future(self._signal())
        self._queue.append((future, partial(fn, *args, **kwargs)))
        self._futures = [one for one in self._futures if not one.done()]
        self._futures.append(future)
        self._next()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        assert not cancel_futures
        self._closed = True
        if wait:
            _all_done(self._futures)

    def _next(self) -> None:
        if self._queue and self._free:
            self._free -= 1
            future, work = self._queue.popleft()
            self._fibers.spawn(lambda: future.end(work), self._over)

    def _over(self, _result: object) -> None:
        self._free += 1
        self._next()


def _all_done(futures: Sequence[_Future]) -> None:
    for future in futures:
        future.exception()
