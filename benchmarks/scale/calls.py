"""Calls of the coordinator from one event loop, as thousands of members make them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any, TypeVar

import grpc
import grpc.aio

from coordinator.client.client import CALL_S, HEARTBEAT_CALL_S, POLL_S
from coordinator.client.command_stream import typed_error
from psrpc.core.errors import PsError
from psrpc.net.channel import CHANNEL_OPTIONS
from psrpc.v1.coordinator_pb2_grpc import CoordinatorStub

DEADLINES_S = {
    "HeartbeatShard": HEARTBEAT_CALL_S,
    "HeartbeatWorker": HEARTBEAT_CALL_S,
    "LeaseWork": POLL_S,
    "CommitBatch": POLL_S,
    "GetCluster": POLL_S,
}
"""Of methods that have another one than :data:`CALL_S`; the same as those of real members."""

AGAIN_S = 0.2
"""Pause before a call that failed is repeated."""

Response = TypeVar("Response")


class CallBook:
    """Counts the calls of all members, and keeps the seconds that those of some methods took."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.leased: float | None = None
        """When the first training task came since this was cleared."""
        self.took_s: dict[str, list[float]] = {"LeaseWork": [], "HeartbeatWorker": []}

    def clear(self) -> None:
        """Forgets all of it; a measurement begins."""
        self.calls.clear()
        self.failed.clear()
        for taken in self.took_s.values():
            taken.clear()


class MemberCalls:
    """One member's connection to the coordinator, like
    :class:`coordinator.client.client.CoordinatorClient` but for an event loop."""

    def __init__(self, address: str, book: CallBook) -> None:
        self.address = address
        self._book = book
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.stub = CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close(None)

    async def call(self, method: str, request: Any) -> Any:
        """Calls once. Raises a PsError as the coordinator raised it, or CoordinatorUnreachable."""
        book = self._book
        book.calls[method] += 1
        began = time.perf_counter()
        try:
            answer = await getattr(self.stub, method)(
                request, timeout=DEADLINES_S.get(method, CALL_S)
            )
        except grpc.RpcError as error:
            typed = typed_error(error, self.address)
            book.failed[f"{method}: {type(typed).__name__}"] += 1
            raise typed from None
        taken = book.took_s.get(method)
        if taken is not None:
            taken.append(time.perf_counter() - began)
        return answer

    async def persist(self, method: str, request: Any) -> Any:
        """Calls until the coordinator answers. Raises an error that is no reason to repeat."""
        while True:
            try:
                return await self.call(method, request)
            except PsError as error:
                if not error.retryable:
                    raise
            await asyncio.sleep(AGAIN_S)
