"""Answers of a coordinator that has no run to serve: the job is done, or cannot be begun.

Shards and workers that a supervisor starts beside such a coordinator would wait for it until their
--connect-timeout, and again at each restart.
"""

from __future__ import annotations

from typing import Any

import grpc

from psrpc.errors import CoordinatorUnreachable, InvalidJob, JobDone, PsError

FIRST_WORDS = {"GetJob", "RegisterShard"}
"""What a process asks first, before it holds anything."""


class Refusal(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic for mypy alone
    """Answers every call on the coordinator's service with ``why`` there is no run."""

    def __init__(self, service: str, why: PsError) -> None:
        self._prefix = f"/{service}/"
        self._why = why

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See grpc.GenericRpcHandler."""
        prefix, _, method = handler_call_details.method.rpartition("/")
        if f"{prefix}/" != self._prefix:
            return None

        async def refuse(_request: Any, _context: Any) -> Any:
            raise self.answer(method)

        return grpc.unary_unary_rpc_method_handler(refuse)

    def answer(self, method: str) -> PsError:
        """What a call hears. A process that holds part of the run waits for a coordinator that
        serves it: a corrected command finds its state."""
        if isinstance(self._why, JobDone):
            return self._why
        if method in FIRST_WORDS:
            return InvalidJob(f"the coordinator refuses to start: {self._why}", code=self._why.code)
        return CoordinatorUnreachable(f"the coordinator refuses to start: {self._why.coded}")
