"""A person who changes the policy of a running job, and tries again until that was accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psrpc.core.errors import DeadlinePassed, NotReady, PsError, Unreachable
from psrpc.core.policy import Policy
from psrpc.v1 import coordinator_pb2 as pb
from tests.sim.network import CALL_S, COORDINATOR
from tests.sim.schedule import Process, Steps

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

AGAIN_S = 0.7
"""How long until they try again."""


class Operator:
    """Wants the changes that the options have, in this order, at moments of their own."""

    def __init__(self, cluster: Cluster) -> None:
        self.process = Process(cluster.schedule, "operator", 1)
        self._cluster = cluster
        self._schedule = cluster.schedule

    def live(self) -> Steps:
        """Gives the operator's orders, once there is something to train."""
        options = self._cluster.options
        for change in options.changes:
            most_s = 1.5 * options.expected_s / len(options.changes)
            yield self._schedule.sleep(self._schedule.random.uniform(0.0, most_s))
            yield from self._change(change)

    def _change(self, policy: Policy) -> Steps:
        request = pb.SetPolicyRequest(settings=written(policy))
        while True:
            try:
                response: pb.SetPolicyResponse = yield self._cluster.network.call(
                    COORDINATOR, "SetPolicy", request, CALL_S
                )
            except (Unreachable, DeadlinePassed, NotReady):
                yield self._schedule.sleep(AGAIN_S)
            except PsError as error:
                # What they want does not go with what stands, or the job is over.
                self._cluster.counts[f"changes refused by {type(error).__name__}"] += 1
                return
            else:
                self._schedule.trace("the policy will be", response.policy, response.settings)
                self._cluster.counts["changes accepted"] += 1
                return


def written(policy: Policy) -> list[str]:
    """A policy as it is asked for: ``key=value``, in order."""
    return [f"{name}={_text(value)}" for name, value in policy.to_json().items()]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
