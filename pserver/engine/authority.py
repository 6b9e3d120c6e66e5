"""Finds out who a message is from and what it may ask for, before the engine sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from google.protobuf.message import DecodeError

from pserver.core.fence import Fence, ShardIdentity
from pserver.core.requests import InitializeRequest, PullRequest, PushRequest, PushResult
from pserver.wire import messages as wire
from psrpc.core.errors import AccessDenied, StaleGeneration
from psrpc.security.signatures import (
    INITIALIZE,
    Keys,
    Session,
    check_decision,
    check_grant,
    read_session,
    receipt_of,
)
from psrpc.v1 import types_pb2 as types


class Credentials:
    """Checks sessions, grants and signed decisions for one shard. Thread-safe.

    A message is first admitted by its fence. Keys change with the generation and generations only
    rise, so a message that the engine admits afterwards is of the generation whose keys it was
    checked by.
    """

    def __init__(
        self, admit: Callable[[Fence], object], identity: Callable[[], ShardIdentity]
    ) -> None:
        """Args:
        admit: raises where a message is not for this shard as it stands.
        identity: where the shard stands.
        """
        self._admit = admit
        self._identity = identity

    def initialize(self, request: InitializeRequest, certificate: str) -> InitializeRequest:
        """Passes the values of a worker that was told to give them; errors as :meth:`push`."""
        session, keys = self._session(request.fence, certificate)
        generation = request.fence.generation
        check_grant(keys.grant, session.worker, generation, INITIALIZE, 0, request.grant)
        return request

    def push(self, request: PushRequest, certificate: str) -> PushRequest:
        """A push, with the worker that it is from.

        Args:
            certificate: the common name of the caller's; empty without certificates.

        Raises:
            AccessDenied: the session or the grant is not of this job's coordinator.
            StaleGeneration: the session was opened with another certificate, or by ``admit``.
        """
        session, keys = self._session(request.fence, certificate)
        attempt = request.attempt
        check_grant(
            keys.grant,
            session.worker,
            request.fence.generation,
            attempt.batch,
            attempt.attempt,
            request.grant,
        )
        return replace(request, worker=session.worker)

    def vouch(self, request: PushRequest, result: PushResult) -> PushResult:
        """The ``result`` of a push, with the proof for the coordinator where the shard has it."""
        identity = self._identity()
        generation = request.fence.generation
        if identity.keys is None or identity.generation != generation:
            # A generation began meanwhile: its coordinator counts anew.
            return result
        if result.outcome == "too_stale":
            return result
        attempt = request.attempt
        receipt = receipt_of(
            identity.keys.grant,
            request.worker,
            generation,
            attempt.batch,
            attempt.attempt,
            identity.shard,
            result.skipped,
        )
        return replace(result, receipt=receipt)

    def pull(self, request: PullRequest, certificate: str) -> PullRequest:
        """A pull, with the worker that it is from and the decision that it brings.

        Raises:
            AccessDenied: the session or the decision is not of this job's coordinator.
            StaleGeneration: as :meth:`push`.
        """
        session, keys = self._session(request.fence, certificate)
        if request.signed is None:
            return replace(request, worker=session.worker)
        check_decision(keys.verify, request.signed)
        try:
            decision = types.Decision.FromString(request.signed.decision)
        except DecodeError:
            raise AssertionError("the coordinator signs decisions alone") from None
        return replace(request, worker=session.worker, decision=wire.from_decision(decision))

    def _session(self, fence: Fence, certificate: str) -> tuple[Session, Keys]:
        self._admit(fence)
        identity = self._identity()
        if identity.keys is None:
            raise AccessDenied(f"shard {identity.shard} knows no session yet", code="PS309")
        session = read_session(identity.keys.verify, fence.session)
        if session.certificate != certificate:
            # After a change of certificates on a machine, the worker opens another session.
            raise StaleGeneration(
                f"{session.worker} registered with certificate {session.certificate!r} and calls "
                f"with {certificate!r}: register again"
            )
        return session, identity.keys
