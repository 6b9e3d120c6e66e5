"""Whom a shard serves: where it stands in the job's history, and what it waits for."""

from __future__ import annotations

import threading
from dataclasses import replace

from pserver.core.fence import Fence, Revocations, ShardIdentity, admit
from pserver.core.requests import Begin, PullRequest, PushRequest
from pserver.engine.parameters import Parameters
from pserver.engine.rounds import Rounds
from psrpc.core.errors import InvalidArgument, JobFailed, NotReady, RoundPassed


class Gate:
    """Any thread may ask. Whoever changes anything holds the shard's lock.

    Attributes:
        identity: replaced as a whole.
        begun: the generation of the last order to begin that was carried out.
        revocations: of this generation.
    """

    def __init__(
        self, identity: ShardIdentity, plan_hash: bytes, held: Parameters, rounds: Rounds
    ) -> None:
        self.identity = identity
        self.begun = identity.generation
        self.revocations = Revocations(identity.generation)
        self._plan_hash = plan_hash
        self._held = held
        self._rounds = rounds

    def turn(self, order: Begin) -> None:
        """Stands at the generation of ``order``, in which nothing has begun and nobody is revoked
        yet."""
        self.identity = replace(
            self.identity,
            generation=order.generation,
            policy=order.policy,
            settings=order.settings or self.identity.settings,
            keys=order.keys,
        )
        self.revocations = Revocations(order.generation)

    def admit(self, fence: Fence) -> None:
        """Passes a message that means this shard as it stands.

        Raises:
            JobFailed: the parameters can no longer be trusted.
            NotReady: its checkpoint is being restored.
            StaleGeneration, JobMismatch: see :func:`pserver.core.fence.admit`.
        """
        self.need_sound()
        admit(fence, self.identity, self._plan_hash)
        if self.begun < self.identity.generation:
            raise self.not_ready()

    def admit_worker(self, request: PushRequest | PullRequest) -> None:
        """The same, of a worker that was not revoked."""
        self.admit(request.fence)
        self.revocations.check(request.worker)

    def need_sound(self) -> None:
        """Raises JobFailed: the parameters can no longer be trusted."""
        if self._held.failure:
            raise JobFailed(f"shard {self.identity.shard} failed: {self._held.failure}")

    def need_values(self) -> None:
        """Raises NotReady: there are no parameters."""
        if not self._held.initialized:
            raise self.not_ready()

    def not_ready(self) -> NotReady:
        """The error that says what the shard waits for."""
        return NotReady(f"shard {self.identity.shard} waits for {self.waiting_for()}")

    def waiting_for(self) -> str:
        """In words; empty when it waits for nothing but pushes."""
        if self.identity.generation == 0:
            return "the coordinator to say where to begin"
        if self.begun < self.identity.generation:
            return "its checkpoint to be restored"
        if not self._held.initialized:
            return "a worker to initialize it"
        if not self.identity.settings.rounds:
            return ""
        return self._rounds.waiting_for()


class RoundWaits:
    """``changed`` is notified of every round, and its lock, the shard's, is held by who calls."""

    def __init__(self, changed: threading.Condition, gate: Gate, held: Parameters) -> None:
        self._changed = changed
        self._gate = gate
        self._held = held
        self._closed = False

    def decided(self, request: PullRequest, decided: int, timeout_s: float) -> None:
        """Waits for the decisions before that of round ``decided``, which come by themselves.

        With backup workers several rounds may be decided by what is staged here already; otherwise
        a worker that brings a decision has brought the one before.
        """
        if self._gate.identity.settings.backups:
            self._await(request, decided, timeout_s)

    def reached(self, request: PullRequest, wanted: int, timeout_s: float) -> None:
        """Waits for round ``wanted``.

        Raises:
            InvalidArgument: there are no rounds.
            RoundPassed: the shard is at a later one.
            NotReady: the time is over.
        """
        gate = self._gate
        if not gate.identity.settings.rounds:
            raise InvalidArgument(
                f"round {wanted} was asked for and this job is async; ask for the newest values"
            )
        self._await(request, wanted, timeout_s)
        if self._held.version > wanted:
            raise RoundPassed(
                f"round {wanted} was asked for; shard {gate.identity.shard} is at round"
                f" {self._held.version}"
            )
        if self._held.version < wanted:
            raise gate.not_ready()

    def close(self) -> None:
        """Lets go of everybody who waits, and of who comes later."""
        self._closed = True
        self._changed.notify_all()

    def _await(self, request: PullRequest, wanted: int, timeout_s: float) -> None:
        def over() -> bool:
            self._gate.admit_worker(request)
            return self._held.version >= wanted or self._closed

        self._changed.wait_for(over, timeout_s)
