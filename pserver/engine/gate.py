"""Decides which messages a shard serves: the sender must be allowed to send the message, and the
message must fit the shard's present state. Also waits for rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from pserver.core.fence import Fence, FencedWorkers, ShardIdentity, admit
from pserver.core.requests import InitializeRequest, PullRequest, PushRequest, PushResult
from pserver.engine.parameters import Parameters
from pserver.engine.rounds import StagedRounds
from psrpc.core.commands import Begin, Keys, WorkerClock
from psrpc.core.errors import (
    AccessDenied,
    InvalidArgument,
    JobFailed,
    NotReady,
    RoundPassed,
    StaleGeneration,
)
from psrpc.security.signatures import (
    INITIALIZE,
    SessionIdentity,
    check_clock,
    check_decision,
    check_grant,
    check_receipts,
    read_session,
    receipt_of,
)
from psrpc.wire.commands import parse_decision


class Gate:
    """Checks messages against the shard's present generation, policy and parameters. Any thread may
    read; callers that change anything hold the shard's lock.

    Attributes:
        identity: the shard's present identity; a change replaces the object, so readers need no
            lock.
        begun: the generation of the last ``Begin`` that was carried out.
        revocations: the workers revoked in this generation.
    """

    def __init__(
        self, identity: ShardIdentity, plan_hash: bytes, held: Parameters, rounds: StagedRounds
    ) -> None:
        self.identity = identity
        self.begun = identity.generation
        self.revocations = FencedWorkers(identity.generation)
        self._plan_hash = plan_hash
        self._held = held
        self._rounds = rounds

    def turn(self, order: Begin) -> None:
        """Enters the generation of ``order``. No worker is revoked in it yet; ``begun`` still names
        the older generation."""
        self.identity = replace(
            self.identity,
            generation=order.generation,
            policy=order.policy,
            settings=order.settings or self.identity.settings,
            keys=order.keys,
        )
        self.revocations = FencedWorkers(order.generation)

    def admit(self, fence: Fence) -> None:
        """Checks that a message is for this shard in its present state.

        Raises:
            JobFailed: the parameters can no longer be trusted.
            NotReady: the shard is restoring its checkpoint.
            StaleGeneration, JobMismatch: see :func:`pserver.core.fence.admit`.
        """
        self.need_sound()
        admit(fence, self.identity, self._plan_hash)
        if self.begun < self.identity.generation:
            raise self.not_ready()

    def admit_worker(self, request: PushRequest | PullRequest) -> None:
        """Does :meth:`admit`, and raises StaleGeneration if the worker was revoked."""
        self.admit(request.fence)
        self.revocations.check(request.worker)

    def need_sound(self) -> None:
        """Raises JobFailed if the parameters can no longer be trusted."""
        if self._held.failure:
            raise JobFailed(f"shard {self.identity.shard} failed: {self._held.failure}")

    def need_values(self) -> None:
        """Raises NotReady if there are no parameters."""
        if not self._held.initialized:
            raise self.not_ready()

    def not_ready(self) -> NotReady:
        """Returns the error with the reason why the shard waits."""
        return NotReady(f"shard {self.identity.shard} waits for {self.waiting_for()}")

    def waiting_for(self) -> str:
        """Describes for users why the shard waits; empty if it only waits for pushes."""
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
    """Waits until rounds are applied. ``changed`` is notified of each applied round; callers hold
    its lock, which is the shard's."""

    def __init__(self, changed: threading.Condition, gate: Gate, held: Parameters) -> None:
        self._changed = changed
        self._gate = gate
        self._held = held
        self._closed = False

    def decided(self, request: PullRequest, decided: int, timeout_s: float) -> None:
        """Waits until the rounds before ``decided`` are applied; their decisions arrive separately.

        Only jobs with backup workers wait: there the staged attempts may serve several decided
        rounds. Without backup workers, a worker that brings a decision has brought the previous one
        too.
        """
        if self._gate.identity.settings.backups:
            self._await(request, decided, timeout_s)

    def reached(self, request: PullRequest, wanted: int, timeout_s: float) -> None:
        """Waits for round ``wanted``.

        Raises:
            InvalidArgument: the job has no rounds.
            RoundPassed: the shard is at a later round.
            NotReady: the timeout has passed.
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
        """Ends all waits, present and future."""
        self._closed = True
        self._changed.notify_all()

    def _await(self, request: PullRequest, wanted: int, timeout_s: float) -> None:
        def over() -> bool:
            self._gate.admit_worker(request)
            return self._held.version >= wanted or self._closed or request.gone()

        self._changed.wait_for(over, timeout_s)


class Credentials:
    """Checks sessions, grants and signed decisions for one shard. Thread-safe.

    ``admit`` checks the fence of a message before its signatures are checked, and the engine checks
    the fence again afterwards. Keys change only with the generation and generations only rise, so a
    message that passes both was checked with the keys of its own generation.
    """

    def __init__(
        self,
        admit: Callable[[Fence], object],
        identity: Callable[[], ShardIdentity],
        shards: int,
    ) -> None:
        """Args:
        admit: raises if a message is not for this shard in its present state.
        identity: returns the shard's present identity.
        shards: their number in the job.
        """
        self._admit = admit
        self._identity = identity
        self._shards = shards

    def initialize(self, request: InitializeRequest, certificate: str) -> InitializeRequest:
        """Returns the request unchanged if the coordinator told this worker to send the initial
        values. Raises the errors of :meth:`push`."""
        session, keys = self._session(request.fence, certificate)
        generation = request.fence.generation
        check_grant(keys.grant, session.worker, generation, INITIALIZE, 0, request.grant)
        return request

    def push(self, request: PushRequest, certificate: str) -> PushRequest:
        """Returns the push with its worker filled in.

        Args:
            certificate: common name of the caller's certificate; empty without certificates.

        Raises:
            AccessDenied: this job's coordinator did not issue the session or the grant.
            StaleGeneration: the session was opened with another certificate; or raised by
                ``admit``.
        """
        session, keys = self._session(request.fence, certificate)
        generation = request.fence.generation
        for part in request.parts:
            batch, number = part.attempt.batch, part.attempt.number
            check_grant(keys.grant, session.worker, generation, batch, number, part.grant)
        return replace(request, worker=session.worker)

    def clock_of(
        self, request: PushRequest | PullRequest, clock: WorkerClock | None
    ) -> WorkerClock | None:
        """Returns the clock that a worker brings from its lease (ssp), with the worker's name
        filled in; None if there is no clock or a newer generation has begun. ``request`` already
        names its worker.

        Raises:
            AccessDenied: this job's coordinator did not issue the clock.
        """
        identity, generation = self._identity(), request.fence.generation
        # If a generation has begun meanwhile, the engine refuses the request.
        if clock is None or identity.keys is None or identity.generation != generation:
            return None
        mine = replace(clock, worker=request.worker)
        check_clock(identity.keys.grant, generation, mine)
        return mine

    def vouch(self, request: PushRequest, result: PushResult) -> PushResult:
        """Returns ``result``, with a receipt for each batch if the shard has them. A receipt proves
        this to the coordinator."""
        identity = self._identity()
        generation = request.fence.generation
        # Another generation has begun meanwhile, so the coordinator needs no receipt of this one.
        if identity.keys is None or identity.generation != generation:
            return result
        if result.outcome in ("too_stale", "one_by_one"):
            return result
        key, shard = identity.keys.grant, identity.shard
        skipped = (result.skipped, *(result.summed_skipped or [False] * len(request.summed)))
        first, *others = [
            receipt_of(key, request.worker, generation, of.batch, of.number, shard, was_skipped)
            for of, was_skipped in zip(request.attempts, skipped, strict=True)
        ]
        return replace(result, receipt=first, summed_receipts=tuple(others))

    def pull(self, request: PullRequest, certificate: str) -> PullRequest:
        """Returns the pull with its worker and its decision filled in.

        Raises:
            AccessDenied: this job's coordinator did not issue the session or the decision, or a
                shard has not vouched for an attempt.
            StaleGeneration: as in :meth:`push`.
        """
        session, keys = self._session(request.fence, certificate)
        generation = request.fence.generation
        for one in request.staged:
            batch, number = one.attempt.batch, one.attempt.number
            check_receipts(
                keys.grant, session.worker, generation, batch, number, one.receipts, self._shards
            )
        request = replace(request, worker=session.worker)
        request = replace(request, clock=self.clock_of(request, request.clock))
        if request.signed is None:
            return request
        check_decision(keys.verify, request.signed)
        decision = parse_decision(request.signed.decision)
        return replace(request, decision=decision)

    def _session(self, fence: Fence, certificate: str) -> tuple[SessionIdentity, Keys]:
        self._admit(fence)
        identity = self._identity()
        if identity.keys is None:
            raise AccessDenied(f"shard {identity.shard} knows no session yet", code="PS309")
        session = read_session(identity.keys.verify, fence.session)
        if session.certificate != certificate:
            # Not AccessDenied: the machine's certificate may have been replaced, and then the
            # worker opens another session.
            raise StaleGeneration(
                f"{session.worker} registered with certificate {session.certificate!r} and calls "
                f"with {certificate!r}: register again"
            )
        return session, identity.keys
