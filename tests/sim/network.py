"""Calls and command streams between processes, over links that lose, delay and repeat."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from psrpc.core.errors import DeadlinePassed, PsError, Unreachable
from tests.sim.faults import CUT, Faults
from tests.sim.schedule import Effect, Process, Schedule, Waiter

COORDINATOR = "coordinator:5000"

RUN_DIR = Path("/sim/run")

SHA = "ab" * 32
"""Of the job file."""

CALL_S, POLL_S, EXCHANGE_S = 10.0, 20.0, 60.0
"""Deadlines of a call that is answered at once, of one that may wait, of one with tensors."""


FAST_S, SLOW_S = 0.0005, 0.004
"""A message takes as long as this, unless it is delayed."""

LONGEST_DELAY_S = 15.0

NOTICED_S = (10.0, 30.0)
"""When gRPC finds out that a connection carries nothing any more."""

REMEMBERED = 16
"""Messages that may come again."""

FORGETTABLE = ("Watch", "GetCluster", "HeartbeatShard", "RegisterWorker")

TELLING = ("LeaseWork", "HeartbeatWorker")
"""What comes often, and is worth remembering when it reports batches."""

WITH_TENSORS = ("Initialize", "Push", "PushPull")

REPEAT_S = 25.0
"""A message that comes twice does so within this time."""

Message = tuple[str, str, Any]
"""Address, method and request."""

Respond = Callable[[Any], None]
"""Takes what a call comes to, or its PsError."""


class Server(Protocol):
    """A process that listens at an address."""

    process: Process

    def handle(self, method: str, request: Any, respond: Respond) -> None:
        """Carries a call out; answers now or later, at most once."""


class Network:
    """Addresses and their listeners. A process that has died refuses connections; one that hangs
    accepts them and does nothing."""

    def __init__(self, schedule: Schedule, faults: Faults) -> None:
        self.schedule = schedule
        self.faults = faults
        self.slow: dict[str, float] = {}
        """Processes that are far away: by name, how long a message to or from them may take."""
        self.refused: Counter[str] = Counter()
        """Errors that calls were answered by, by method and class."""
        self._servers: dict[str, Server] = {}
        self._cuts: Counter[tuple[str, str]] = Counter()
        self._sent: dict[str, deque[Message]] = {}
        self.unanswered: dict[Call, Message] = {}
        """Calls to shards whose answers have not arrived."""

    def listen(self, address: str, server: Server) -> None:
        """``server`` answers at ``address`` from now on, until its process is gone."""
        self._servers[address] = server

    def leave(self, address: str, server: Server) -> None:
        """``server`` answers no more at ``address``; its process goes on."""
        if self._servers.get(address) is server:
            del self._servers[address]

    def cut(self, source: str, target: str, for_s: float) -> None:
        """Nothing that the process ``source`` sends arrives at ``target`` from now on."""
        self._cuts[source, target] += 1
        self.schedule.after(for_s, None, self._mend, source, target)

    def _mend(self, source: str, target: str) -> None:
        self._cuts[source, target] -= 1

    def swallows(self, source: Process, target: Process) -> bool:
        """Whether nothing of one process arrives at another now."""
        return bool(self._cuts[source.name, target.name]) and not self.faults.over

    def parts(self, one: Process, other: Process) -> bool:
        """Whether they have no way there, or no way back."""
        return self.swallows(one, other) or self.swallows(other, one)

    def latency(self, *processes: Process) -> float:
        """Of one message between these processes, in seconds."""
        if self.faults.strikes("delay"):
            return self.faults.between(0.05, LONGEST_DELAY_S)
        if self.slow and not self.faults.over:
            far_s = sum(self.slow.get(process.name, 0.0) for process in processes)
            if far_s:
                self.faults.fired["far away"] += 1
                return self.faults.between(0.0, far_s)
        return self.schedule.random.uniform(FAST_S, SLOW_S)

    def call(
        self,
        address: str,
        method: str,
        request: Any,
        deadline_s: float,
        under_way: dict[Call, None] | None = None,
    ) -> Effect:
        """The effect of one try of a call, which is in ``under_way`` for so long.

        Raises:
            Unreachable: nothing listens there, or the connection broke; it may have had its effect.
            DeadlinePassed: no answer came in time.
            PsError: as the other side raised it.
        """

        def effect(task: Waiter) -> None:
            Call(self, task, address, method, request, deadline_s, under_way).begin()

        return effect

    def remember(self, address: str, method: str, request: Any) -> None:
        """A message that may come again at a bad moment."""
        if method in TELLING and not request.done:
            return
        if method not in FORGETTABLE:
            sent = self._sent.setdefault(address.partition(":")[0], deque(maxlen=REMEMBERED))
            sent.append((address, method, request))

    def last(self, address: str) -> tuple[str, Any] | None:
        """The last message with tensors that went to a shard's address."""
        for to, method, request in reversed(self._sent.get("shard", ())):
            if to == address and method in WITH_TENSORS:
                return method, request
        return None

    def echo(self, role: str) -> None:
        """Something has changed at one of these: messages of before come now, or a little
        later."""
        sent = [*self._sent.get(role, ())]
        # What got no answer most likely had no effect yet.
        sent += 5 * [m for m in self.unanswered.values() if m[0].startswith(role)]
        while sent and self.faults.strikes("echo"):
            message = self.schedule.random.choice(sent)
            delay_s = self.schedule.random.choice((0.0, self.latency(), 0.3))
            self.schedule.after(delay_s, None, self._come_again, *message)

    def _come_again(self, address: str, method: str, request: Any) -> None:
        server = self.server_at(address)
        if server is not None:
            server.process.do(server.handle, method, request, partial(self.note, method))

    def note(self, method: str, answer: Any) -> None:
        """Counts the errors that calls are answered by."""
        if isinstance(answer, PsError):
            self.refused[f"{method}: {type(answer).__name__}"] += 1

    def server_at(self, address: str) -> Server | None:
        """The server at an address now."""
        server = self._servers.get(address)
        return server if server is not None and server.process.alive else None


class Call:
    """One try of a call."""

    def __init__(
        self,
        network: Network,
        task: Waiter,
        address: str,
        method: str,
        request: Any,
        deadline_s: float,
        under_way: dict[Call, None] | None,
    ) -> None:
        self._network = network
        self._task = task
        self._under_way = under_way
        self._address = address
        self._method = method
        self._request = request
        self._until = network.schedule.now() + deadline_s
        self._done = False

    def give_up(self) -> None:
        """The caller does not wait any longer."""
        self._end_after(0.0, Unreachable(self._text("given up")))

    def begin(self) -> None:
        """Sends it."""
        if self._under_way is not None:
            self._under_way[self] = None
        network = self._network
        faults = network.faults
        network.remember(self._address, self._method, self._request)
        if self._method in WITH_TENSORS:
            network.unanswered[self] = self._address, self._method, self._request
        network.schedule.trace(self._task.process, self._method, "to", self._address)
        if faults.strikes("request lost"):
            self._end_after(network.latency(), Unreachable(self._text("reset")))
        elif faults.strikes("request lost in silence"):
            self._end_at_deadline()
        elif (there := network.server_at(self._address)) is not None and network.swallows(
            self._task.process, there.process
        ):
            self._end_unnoticed()
        else:
            far = (self._task.process,) if there is None else (self._task.process, there.process)
            network.schedule.after(network.latency(*far), None, self._arrive, True)
            if faults.strikes("duplicate"):
                # Soon after, or when much has changed since: a server's thread may have slept.
                again_s = REPEAT_S * network.schedule.random.random() ** 4
                network.schedule.after(again_s, None, self._arrive, False)

    def _arrive(self, first: bool) -> None:
        network = self._network
        server = network.server_at(self._address)
        if server is None:
            if first:
                self._break("connection refused")
            return
        process = server.process
        answered = False

        def respond(value: Any) -> None:
            nonlocal answered
            assert not answered, f"{process} answered {self._method} twice"
            answered = True
            network.note(self._method, value)
            if isinstance(value, PsError):
                network.schedule.trace(process, "answers", self._method, value)
            if first:
                self._answer(process, value)

        def gone() -> None:
            # Its kernel resets the connection.
            if not answered and first:
                self._break("the connection broke")

        process.do(server.handle, self._method, self._request, respond)
        if not answered and first:
            if process.alive:
                process.at_death(gone)
                self._end_at_deadline()
            else:
                gone()

    def _answer(self, process: Process, value: Any) -> None:
        network = self._network
        faults = network.faults
        if faults.strikes("crash after the effect"):
            # Nothing that it says from now on is heard.
            network.schedule.after(0.0, process, process.kill)
            self._break("the connection broke")
        elif network.swallows(process, self._task.process):
            self._end_unnoticed()
        elif faults.strikes("reply lost"):
            self._break("the connection broke")
        elif faults.strikes("reply lost in silence"):
            self._end_at_deadline()
        else:
            network.unanswered.pop(self, None)
            self._end_after(network.latency(process, self._task.process), value)

    def _break(self, why: str) -> None:
        self._end_after(self._network.latency(), Unreachable(self._text(why)))

    def _end_unnoticed(self) -> None:
        network = self._network
        network.faults.fired[CUT] += 1
        left_s = max(0.0, self._until - network.schedule.now())
        noticed_s = min(left_s, network.faults.between(*NOTICED_S))
        self._end_after(noticed_s, Unreachable(self._text("nothing comes through")))

    def _end_at_deadline(self) -> None:
        left_s = max(0.0, self._until - self._network.schedule.now())
        self._end_after(left_s, DeadlinePassed(self._text("no answer")))

    def _end_after(self, delay_s: float, value: Any) -> None:
        self._network.schedule.after(delay_s, self._task.process, self._end, value)

    def _end(self, value: Any) -> None:
        if not self._done:
            self._done = True
            if self._under_way is not None:
                self._under_way.pop(self, None)
            self._task.resume(value)

    def _text(self, why: str) -> str:
        return f"{self._method} at {self._address}: {why}"
