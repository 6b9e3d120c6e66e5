"""Identifies the worker that sent a message and checks its permissions, before the engine sees
it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pserver.core.fence import Fence, ShardIdentity
from pserver.core.requests import InitializeRequest, PullRequest, PushRequest, PushResult
from psrpc.core.commands import Keys
from psrpc.core.errors import AccessDenied, StaleGeneration
from psrpc.security.signatures import (
    INITIALIZE,
    SessionIdentity,
    check_decision,
    check_grant,
    read_session,
    receipt_of,
)
from psrpc.wire.commands import parse_decision


class Credentials:
    """Checks sessions, grants and signed decisions for one shard. Thread-safe.

    The fence admits a message first. Keys change with the generation and generations only rise, so
    a message that the engine admits afterwards was checked with the keys of its own generation."""

    def __init__(
        self, admit: Callable[[Fence], object], identity: Callable[[], ShardIdentity]
    ) -> None:
        """Args:
        admit: raises if a message is not for this shard in its present state.
        identity: returns the shard's present identity.
        """
        self._admit = admit
        self._identity = identity

    def initialize(self, request: InitializeRequest, certificate: str) -> InitializeRequest:
        """Passes values from a worker that the coordinator told to send them; raises as
        :meth:`push`."""
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
        generation, attempt = request.fence.generation, request.attempt.number
        check_grant(keys.grant, session.worker, generation, request.batch, attempt, request.grant)
        return replace(request, worker=session.worker)

    def vouch(self, request: PushRequest, result: PushResult) -> PushResult:
        """Returns ``result`` with a receipt, the proof for the coordinator, if the shard has the
        batch."""
        identity = self._identity()
        generation = request.fence.generation
        # A generation began meanwhile, and its coordinator counts anew.
        if identity.keys is None or identity.generation != generation:
            return result
        if result.outcome == "too_stale":
            return result
        receipt = receipt_of(
            identity.keys.grant,
            request.worker,
            generation,
            request.batch,
            request.attempt.number,
            identity.shard,
            result.skipped,
        )
        return replace(result, receipt=receipt)

    def pull(self, request: PullRequest, certificate: str) -> PullRequest:
        """Returns the pull with its worker and its decision filled in.

        Raises:
            AccessDenied: this job's coordinator did not issue the session or the decision.
            StaleGeneration: as :meth:`push`.
        """
        session, keys = self._session(request.fence, certificate)
        if request.signed is None:
            return replace(request, worker=session.worker)
        check_decision(keys.verify, request.signed)
        decision = parse_decision(request.signed.decision)
        return replace(request, worker=session.worker, decision=decision)

    def _session(self, fence: Fence, certificate: str) -> tuple[SessionIdentity, Keys]:
        self._admit(fence)
        identity = self._identity()
        if identity.keys is None:
            raise AccessDenied(f"shard {identity.shard} knows no session yet", code="PS309")
        session = read_session(identity.keys.verify, fence.session)
        if session.certificate != certificate:
            # After a change of the machine's certificate, the worker opens another session.
            raise StaleGeneration(
                f"{session.worker} registered with certificate {session.certificate!r} and calls "
                f"with {certificate!r}: register again"
            )
        return session, identity.keys
