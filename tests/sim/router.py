"""A worker's calls to all shards, repeated as ``worker.router`` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from psrpc.errors import NotReady, PsError, SegmentLost
from psrpc.retry import RetryPolicy
from tests.sim.network import Call, Network
from tests.sim.place import EXCHANGE_S
from tests.sim.schedule import Steps, gather
from worker.membership import Membership


class Router:
    """The shards, as one worker sees them."""

    def __init__(
        self,
        network: Network,
        membership: Membership,
        patience_s: float,
        shared_memory: bool,
        hurry: Callable[[], None],
    ) -> None:
        """``hurry`` is called when a shard has to be asked again."""
        self.addresses: Sequence[str] = ()
        self.hurried = False
        """Whether a shard that does not answer is awaited."""
        self._network = network
        self._schedule = network.schedule
        self._membership = membership
        self._retry = RetryPolicy(budget_s=patience_s)
        self._shared_memory = shared_memory
        self._hurry = hurry
        self._under_way: set[Call] = set()
        self._pulling = False

    def interrupt(self) -> None:
        """Waits no longer for shards where nothing can matter any more; a push may still come to
        its end when the process is only told to stop."""
        if self._membership.outdated or (self._membership.interrupted and self._pulling):
            for call in list(self._under_way):
                call.give_up()

    def call(self, method: str, requests: Sequence[Any]) -> Steps:
        """A call to each shard, side by side; the answers, and who had to be asked again."""
        self._pulling = method == "Pull"
        given_up: list[PsError] = []
        asked_again: set[int] = set()
        results = yield gather(
            [
                self._one(shard, method, request, given_up, asked_again)
                for shard, request in enumerate(requests)
            ]
        )
        self.hurried = False
        errors = [result for result in results if isinstance(result, PsError)]
        if errors:
            self._membership.check()
            raise min(errors, key=lambda error: error.retryable)
        return results, frozenset(asked_again)

    def _one(
        self,
        shard: int,
        method: str,
        request: Any,
        given_up: list[PsError],
        asked_again: set[int],
    ) -> Steps:
        began, failures = self._schedule.now(), 0
        while True:
            try:
                answer = yield self._network.call(
                    self.addresses[shard], method, request, EXCHANGE_S, self._under_way
                )
                return answer
            except PsError as error:
                if not error.retryable:
                    given_up.append(error)
                    return error
                if self._shared_memory and not isinstance(error, NotReady):
                    # The shard may still write there.
                    lost = SegmentLost(str(error))
                    given_up.append(lost)
                    return lost
                last = error
            if not self.hurried:
                self.hurried = True
                self._hurry()
            failures += 1
            asked_again.add(shard)
            pause_s = self._retry.pause_s(failures, self._schedule.random.random())
            if (
                given_up
                or self._membership.interrupted
                or self._schedule.now() - began + pause_s > self._retry.budget_s
            ):
                return last
            yield self._schedule.sleep(pause_s)
