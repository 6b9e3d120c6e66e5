"""What a message believes about the cluster, and whether a shard may act on it."""

from __future__ import annotations

from dataclasses import dataclass

from psrpc.core.errors import JobMismatch, ResourceExhausted, StaleGeneration
from psrpc.core.policy import ASYNC, Policy
from psrpc.security.signatures import Keys

MAX_REVOKED = 1 << 16
"""Workers that may be revoked in one generation: some 10 MB of names."""


@dataclass(frozen=True, slots=True)
class Fence:
    """See the message of the same name."""

    generation: int
    policy: int
    plan_hash: bytes
    shard_incarnation: int
    session: bytes = b""


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """Which shard a process is, at what point of the job's history, by what policy, and by which
    keys it checks workers.

    Generation and policy are 0 and there are no keys before the coordinator has told it where to
    begin.
    """

    shard: int
    incarnation: int
    generation: int
    policy: int
    settings: Policy = ASYNC
    keys: Keys | None = None


def admit(fence: Fence, identity: ShardIdentity, plan_hash: bytes) -> None:
    """Refuses a message that means another process or another time.

    Raises:
        StaleGeneration: another incarnation, generation or policy is meant.
        JobMismatch: the sender works by another plan.
    """
    me = f"shard {identity.shard}"
    if identity.generation == 0:
        raise StaleGeneration(
            f"the message is of generation {fence.generation}; {me} has not begun yet"
        )
    if fence.shard_incarnation != identity.incarnation:
        raise StaleGeneration(
            f"the message is for incarnation {fence.shard_incarnation} of {me};"
            f" this is {identity.incarnation}"
        )
    if fence.generation != identity.generation:
        raise StaleGeneration(
            f"the message is of generation {fence.generation}; {me} is in {identity.generation}"
        )
    if fence.policy != identity.policy:
        raise StaleGeneration(
            f"the message is of policy {fence.policy}; {me} follows {identity.policy}"
        )
    if fence.plan_hash != plan_hash:
        raise JobMismatch(
            f"the message follows plan {fence.plan_hash.hex()[:12] or '(none)'};"
            f" {me} holds plan {plan_hash.hex()[:12]}"
        )


class Revocations:
    """The revocations of one generation. Whoever obeys holds the shard's lock; any thread reads."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.number = 0
        """The greatest that was obeyed. Set last: whoever reads it may lease that worker's
        batches to others."""
        self._workers: set[str] = set()

    def refuse(self, worker: str) -> None:
        """Refuses ``worker`` from now on.

        Raises:
            ResourceExhausted: there are too many. Forgetting one would let a worker push whose
                work has been given to others, so this shard has to begin anew.
        """
        if len(self._workers) >= MAX_REVOKED and worker not in self._workers:
            raise ResourceExhausted(
                f"{MAX_REVOKED} workers were revoked in generation {self.generation} already;"
                " no more can be remembered"
            )
        self._workers.add(worker)

    def check(self, worker: str) -> None:
        """Passes a worker that was not revoked.

        Raises:
            StaleGeneration: it was; it has to register again.
        """
        if worker in self._workers:
            raise StaleGeneration(
                f"{worker} was taken for gone in generation {self.generation}: register again"
            )
