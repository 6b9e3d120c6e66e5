"""What a worker and the coordinator say to each other; ``worker.standing`` in the simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coordinator.client import FIRST_RETRY_S, HEARTBEAT_CALL_S, RETRY_S
from psrpc.errors import DeadlinePassed, PsError, Unreachable
from psrpc.retry import RetryPolicy
from tests.sim.place import COORDINATOR
from tests.sim.router import Router
from tests.sim.schedule import Effect, Signal, Steps
from worker import actions as does
from worker.membership import Membership
from worker.standing import FAREWELL_S, HURRY_S

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

RECONNECT = RetryPolicy(first_s=FIRST_RETRY_S, longest_s=RETRY_S)


class Standing:
    """Attributes:
    membership: what the worker knows of itself.
    doing: for the status.
    due: a heartbeat is wanted now.
    """

    def __init__(self, cluster: Cluster, membership: Membership) -> None:
        self.membership = membership
        self.doing = ""
        self.due = Signal(cluster.schedule)
        self._schedule = cluster.schedule
        self._network = cluster.network

    def beat(self, router: Router) -> Steps:
        """Heartbeats, for as long as the process lives."""
        while True:
            yield from self._beat_once(router, HEARTBEAT_CALL_S)
            every_s = self.membership.heartbeat_s
            yield self.due.wait(min(every_s, HURRY_S) if router.hurried else every_s)

    def _beat_once(self, router: Router, deadline_s: float) -> Steps:
        beat = self.membership.beat(self.doing)
        if beat is not None:
            try:
                response = yield self._call("HeartbeatWorker", beat.request, deadline_s)
            except PsError:
                return
            self.membership.heard(beat, response)
            router.interrupt()

    def check(self, finishing: bool = False) -> None:
        """As Standing.check does: what is nearly finished goes on although the process is told to
        stop."""
        if not finishing or self.membership.outdated:
            self.membership.check()

    def leave(self, router: Router, action: does.Leave) -> Steps:
        """Says goodbye."""
        if self.membership.worker:
            yield from self._beat_once(router, FAREWELL_S)
            request = self.membership.leave(action.reason, action.fatal)
            try:
                yield self._call("LeaveWorker", request, FAREWELL_S)
            except PsError:
                return

    def persist(
        self, method: str, request: Any, deadline_s: float, finishing: bool = False
    ) -> Steps:
        """A call to the coordinator, repeated while that cannot be reached."""
        failures = 0
        self.check(finishing)
        while True:
            if failures:
                self.membership.check()
            try:
                response = yield self._call(method, request, deadline_s)
            except (Unreachable, DeadlinePassed):
                failures += 1
                pause_s = RECONNECT.pause_s(failures, self._schedule.random.random())
                yield self._schedule.sleep(pause_s)
            else:
                return response

    def _call(self, method: str, request: Any, deadline_s: float) -> Effect:
        return self._network.call(COORDINATOR, method, request, deadline_s)
