"""Compares the cluster state that a message assumes with the state of a shard."""

from __future__ import annotations

from dataclasses import dataclass

from psrpc.core.commands import Keys
from psrpc.core.errors import JobMismatch, ResourceExhausted, StaleGeneration
from psrpc.core.policy import ASYNC, Policy

MAX_REVOKED = 1 << 16
"""Maximum number of revoked workers per generation: about 10 MB of names."""


@dataclass(frozen=True, slots=True)
class Fence:
    """The cluster state that a message assumes; same fields as the protobuf message ``Fence``."""

    generation: int
    policy: int
    plan_hash: bytes
    shard_incarnation: int
    session: bytes = b""


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """Identifies a shard process: its generation and incarnation, its policy, and the keys that
    check workers' messages.

    Generation and policy are 0 and ``keys`` is None until the coordinator sends ``Begin``.
    """

    shard: int
    incarnation: int
    generation: int
    policy: int
    settings: Policy = ASYNC
    keys: Keys | None = None


def admit(fence: Fence, identity: ShardIdentity, plan_hash: bytes) -> None:
    """Refuses a message meant for another process or another time.

    Raises:
        StaleGeneration: the message is for another incarnation, generation or policy.
        JobMismatch: the sender uses another plan.
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


class FencedWorkers:
    """The revocations of one generation. A thread that adds one holds the shard's lock; any thread
    may read."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.number = 0
        """Number of the newest revocation carried out. Set it after the revocation has taken
        effect: when the coordinator reads the number, it may lease the revoked worker's batches to
        others."""
        self._workers: set[str] = set()

    def refuse(self, worker: str) -> None:
        """Refuses ``worker`` from now on.

        Raises:
            ResourceExhausted: too many revocations. If the shard forgot one, that worker could push
                batches that other workers have now, so this shard has to begin again.
        """
        if len(self._workers) >= MAX_REVOKED and worker not in self._workers:
            raise ResourceExhausted(
                f"{MAX_REVOKED} workers were revoked in generation {self.generation} already;"
                " no more can be remembered"
            )
        self._workers.add(worker)

    def check(self, worker: str) -> None:
        """Checks that ``worker`` was not revoked.

        Raises:
            StaleGeneration: it was revoked and has to register again.
        """
        if worker in self._workers:
            raise StaleGeneration(
                f"{worker} was taken for gone in generation {self.generation}: register again"
            )
