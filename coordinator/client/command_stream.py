"""The stream of commands from the coordinator to a shard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from psrpc.core.errors import (
    CoordinatorUnreachable,
    DeadlinePassed,
    InvalidArgument,
    PsError,
    RemoteFailure,
    Unreachable,
)
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.wire.status import error_from_rpc


class CommandStream:
    """The commands for one shard; iterate it. Thread-safe: any thread may ``cancel``."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address
        self._cancelled = False

    def __iter__(self) -> Iterator[pb.WatchResponse]:
        """Yields commands until the coordinator ends the stream, ``cancel`` is called or
        ``WATCH_S`` have passed; then watch again. Every command is idempotent, since the
        coordinator repeats on a new stream those that the shard may have missed.

        Raises:
            CoordinatorUnreachable: the connection broke.
            PsError: as the coordinator raised it.
        """
        try:
            yield from self._call
        except grpc.RpcError as error:
            if self._cancelled:
                return
            typed = typed_error(error, self._address)
            if not isinstance(typed, DeadlinePassed):
                raise typed from None

    def cancel(self) -> None:
        """Ends the iteration, on whichever thread it runs."""
        self._cancelled = True
        self._call.cancel()


def typed_error(error: grpc.RpcError, address: str) -> PsError:
    """Converts a gRPC error; an unreachable peer becomes CoordinatorUnreachable."""
    typed = error_from_rpc(error, f"coordinator at {address}")
    if isinstance(typed, RemoteFailure) and error.code() == grpc.StatusCode.UNIMPLEMENTED:
        return InvalidArgument(
            f"{address} is not a coordinator: it does not know what it is asked; give the "
            "coordinator's address, not a shard's",
            code="PS212",
        )
    if not isinstance(typed, Unreachable):
        return typed
    unreachable = CoordinatorUnreachable(str(typed))
    unreachable.sent = typed.sent
    return unreachable
