"""Maps error classes to gRPC status, and back to the same class at the client."""

from __future__ import annotations

import re
from collections.abc import Iterable

import grpc

from psrpc.core import errors
from psrpc.core.errors import PsError
from psrpc.core.text import sanitize

METADATA_KEY = "psrpc-error"
"""Trailing metadata that names the class. Load-bearing."""

CODE_KEY = "psrpc-code"
"""Trailing metadata with the code, ``PS104``. Load-bearing."""

LONGEST_DETAILS = 2000
"""Maximum bytes of a message in a status, in UTF-8. Each byte may become three on the wire, and a
client replaces a status of more than 8 KiB by another error."""

_CUT = " ..."
"""The end of a message that was cut."""

CODES: dict[type[PsError], grpc.StatusCode] = {
    errors.PsError: grpc.StatusCode.INTERNAL,
    errors.InvalidJob: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidSetting: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidData: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.JobDone: grpc.StatusCode.FAILED_PRECONDITION,
    errors.JobMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleGeneration: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SegmentLost: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RoundPassed: grpc.StatusCode.OUT_OF_RANGE,
    errors.NotReady: grpc.StatusCode.UNAVAILABLE,
    errors.Forming: grpc.StatusCode.UNAVAILABLE,
    errors.Preparing: grpc.StatusCode.UNAVAILABLE,
    errors.Stalled: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.ShardUnreachable: grpc.StatusCode.UNAVAILABLE,
    errors.CoordinatorUnreachable: grpc.StatusCode.UNAVAILABLE,
    errors.CoordinatorRefuses: grpc.StatusCode.UNAVAILABLE,
    errors.OutcomeUnknown: grpc.StatusCode.UNAVAILABLE,
    errors.AccessDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TableFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.CheckpointError: grpc.StatusCode.DATA_LOSS,
    errors.LaunchFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.JobFailed: grpc.StatusCode.ABORTED,
    errors.PortInUse: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unreachable: grpc.StatusCode.UNAVAILABLE,
    errors.NotConnected: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.RemoteFailure: grpc.StatusCode.INTERNAL,
}

_BY_NAME = {cls.__name__: cls for cls in CODES}

_WITHOUT_NAME: dict[grpc.StatusCode, type[PsError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.Unreachable,
    grpc.StatusCode.CANCELLED: errors.Unreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlinePassed,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.ResourceExhausted,
    grpc.StatusCode.UNAUTHENTICATED: errors.AccessDenied,
    grpc.StatusCode.PERMISSION_DENIED: errors.AccessDenied,
}
"""Classes for statuses that come from gRPC itself and so name no class."""

_CODE = re.compile(r"PS\d{3}")

_NOT_CONNECTED = "failed to connect"
"""The beginning of the details of an UNAVAILABLE call that gRPC certainly did not send."""

_TO_THE_CAUSE = re.compile(
    r"failed to connect to all addresses; last error: [A-Z_]+: \S+ "
    r"(Failed to connect to remote host: )?"
)


def details(error: PsError) -> str:
    """Returns the error's message for the status; cuts a very long message."""
    text = str(error).encode()
    if len(text) <= LONGEST_DETAILS:
        return str(error)
    return text[:LONGEST_DETAILS].decode(errors="ignore") + _CUT


def trailing_metadata(error: PsError) -> tuple[tuple[str, str], ...]:
    """Returns the metadata by which the client can raise the same class."""
    return ((METADATA_KEY, type(error).__name__), (CODE_KEY, error.code))


def error_from_rpc(rpc_error: grpc.RpcError, peer: str) -> PsError:
    """Returns the error that the server raised, or one for the failure of the call itself.

    Args:
        rpc_error: from a threaded or asyncio stub.
        peer: the server's name for the message, e.g. ``"shard 1 at host:5001"``.
    """
    code: grpc.StatusCode = rpc_error.code()
    details = sanitize(rpc_error.details() or "", LONGEST_DETAILS + len(_CUT))
    metadata: Iterable[tuple[str, str | bytes]] = rpc_error.trailing_metadata() or ()  # type: ignore[assignment]  # the stubs' metadata is not iterable, gRPC's is
    trailing = dict(metadata)
    name = trailing.get(METADATA_KEY)
    if isinstance(name, str) and name in _BY_NAME:
        return _BY_NAME[name](details, code=_code(trailing.get(CODE_KEY)))
    cls = _WITHOUT_NAME.get(code, errors.RemoteFailure)
    if cls is errors.Unreachable and details.startswith(_NOT_CONNECTED):
        cls = errors.NotConnected
    return cls(f"{peer}: {_in_words(code, details)}".rstrip())


def _in_words(code: grpc.StatusCode, details: str) -> str:
    """Rewords gRPC's details of a failed call for users."""
    if code is grpc.StatusCode.UNAVAILABLE:
        return f"unreachable: {_TO_THE_CAUSE.sub('', details, count=1)}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and "Deadline Exceeded" in details:
        return "no answer in time"
    return f"{code.name} {details}"


def _code(value: str | bytes | None) -> str:
    """Returns a peer's ``value`` if it is an error code, otherwise an empty string."""
    return value if isinstance(value, str) and _CODE.fullmatch(value) else ""
