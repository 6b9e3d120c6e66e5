"""The ParameterServer service: decodes, calls the engine, encodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from pserver import wire
from pserver.arrival import Chunks
from pserver.conversation import Conversation
from pserver.engine import ShardEngine
from psrpc.codec import encode_stream
from psrpc.v1 import parameter_server_pb2 as pb

Context = grpc.ServicerContext

NO_DEADLINE_S = 60.0
"""How long a call that came without a deadline may wait."""


def patience_s(context: Context) -> float:
    """How long a call may wait in here, so that its error still reaches the caller in time."""
    left = context.time_remaining()
    return NO_DEADLINE_S if left is None else max(0.0, left - min(0.5, left / 10))


class ParameterServerServicer:
    """One method per RPC; the contract is in protos/psrpc/v1/parameter_server.proto.

    ``engine`` returns the shard's engine, or raises NotReady while there is none.
    """

    def __init__(self, engine: Callable[[], ShardEngine]) -> None:
        self._engine = engine
        self._conversations: dict[Conversation, Context] = {}

    def close(self) -> None:
        """Ends the conversations in which nothing happens; the others end with their exchange."""
        for conversation, context in list(self._conversations.items()):
            conversation.leaving = True
            if conversation.idle:
                context.cancel()  # type: ignore[no-untyped-call]  # grpc's

    def initialize(self, requests: Iterator[bytes], context: Context) -> pb.InitializeResponse:
        engine = self._engine()
        header, pieces = wire.read_stream(requests, pb.InitializeHeader)
        request = wire.from_initialize(header)
        version, already = engine.initialize(request, Chunks(pieces), patience_s(context))
        return pb.InitializeResponse(version=version, already=already)

    def pull(self, request: pb.PullRequest, context: Context) -> Iterator[bytes]:
        engine = self._engine()
        values = engine.pull(wire.from_pull(request), patience_s(context))
        header = wire.to_pull_header(engine.plan, values)
        return encode_stream(header, wire.value_parts(engine.plan, values))

    def push_gradients(
        self, requests: Iterator[bytes], context: Context
    ) -> pb.PushGradientsResponse:
        engine = self._engine()
        with engine.refusals_counted():
            header, pieces = wire.read_stream(requests, pb.PushHeader)
            result = engine.push(wire.from_push(header), Chunks(pieces), patience_s(context))
        return pb.PushGradientsResponse(result=wire.to_push_result(result))

    def exchange(self, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        conversation = Conversation(self._engine())
        with self._present(conversation, context):
            yield from conversation.answers(requests, lambda: patience_s(context))

    def get_status(self, _request: pb.GetStatusRequest, _context: Context) -> pb.GetStatusResponse:
        engine = self._engine()
        report, identity = engine.report(), engine.identity
        return pb.GetStatusResponse(
            shard=identity.shard,
            incarnation=identity.incarnation,
            generation=identity.generation,
            policy=identity.policy,
            version=report.version,
            initialized=report.initialized,
            nbytes=report.nbytes,
            applied=report.counters.applied,
            already_applied=report.counters.already_applied,
            staged=report.counters.staged,
            skipped=report.counters.skipped,
            refused=report.counters.refused,
            staleness_counts=report.counters.staleness,
            staged_now=report.staged_now,
            waiting_for=report.waiting_for,
        )

    @contextmanager
    def _present(self, conversation: Conversation, context: Context) -> Iterator[None]:
        self._conversations[conversation] = context
        try:
            yield
        finally:
            del self._conversations[conversation]
