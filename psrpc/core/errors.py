"""The error classes of this project.

``psrpc.wire.status`` maps each class to a gRPC status and back, so an error raised in a server
arrives at the client as the same class. A message names the thing, its value and the expected
value. Each class has a code with a section in ``docs/errors.md``. A single error may have a code of
its own if it needs another fix than its class. ``PS1xx`` is for the job and the command line,
``PS2xx`` the network, ``PS3xx`` access, ``PS4xx`` data and checkpoints, ``PS5xx`` memory, disk and
devices, ``PS6xx`` training.
"""

from __future__ import annotations

import errno
import re

_CODED = re.compile(r"(PS\d{3}): ")


class PsError(Exception):
    """Root of all errors that a user may see.

    ``retryable``: whether trying again may help. ``sent``: False if the request certainly changed
    nothing at the peer. ``code``: the section in ``docs/errors.md``.
    """

    retryable = False
    sent = True
    code = "PS699"

    ag_pass_through = True
    """Makes TensorFlow's AutoGraph raise this error instead of one of its own with the same
    text."""

    def __init__(self, message: str = "", *, code: str = "") -> None:
        """Takes the code from ``code``, the beginning of ``message`` or the class, in this order.
        The second source preserves the code of an error that was stored or sent as text, such as a
        job's failure reason."""
        found = _CODED.match(message)
        if found:
            code, message = code or found[1], message[found.end() :]
        super().__init__(message)
        if code:
            self.code = code

    @property
    def coded(self) -> str:
        """``"PS204: ..."``: the message with its code, for logs and statuses."""
        return f"{self.code}: {self}"


_FULL = {"SQLITE_FULL", errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {"SQLITE_READONLY", "SQLITE_PERM", errno.EACCES, errno.EPERM, errno.EROFS}


def disk_code(error: BaseException) -> str:
    """Returns the code of an ``OSError`` or ``sqlite3.Error``: full disk (PS502), forbidden file
    (PS503) or failing disk (PS504)."""
    name = getattr(error, "sqlite_errorname", "")
    kind = name.partition("_")[2] and "_".join(name.split("_")[:2])
    why = getattr(error, "errno", None) or kind
    return "PS502" if why in _FULL else "PS503" if why in _FORBIDDEN else "PS504"


_DISK_ADVICE = {
    "PS502": "; make room there",
    "PS503": "; let this user write there (`ls -ld` shows owner and mode), or choose another place",
}


def disk_reason(error: OSError) -> str:
    """Returns the operating system's text of the error, with advice if the disk is full or the file
    forbidden."""
    return f"{error.strerror or error}{_DISK_ADVICE.get(disk_code(error), '')}"


def error_line(error: PsError, before: str = "") -> str:
    """Returns the last line that a failed command writes to standard error: ``"error PS204: ..."``,
    with ``before`` in front of the message."""
    return f"error {error.code}: {before}{error}"


class InvalidJob(PsError):
    """The job file, an override or the model is unusable. Nothing was started."""

    code = "PS101"


class InvalidSetting(InvalidJob):
    """A field of the job, or a setting of its policy, has an invalid value."""

    code = "PS105"


class InvalidData(InvalidJob):
    """The job's data is unreadable, or differs from its description."""

    code = "PS106"


class InvalidArgument(PsError):
    """A request is malformed: unknown arena, wrong length, garbage. Nothing was changed."""

    code = "PS110"


class AlreadyExists(PsError):
    """The requested place is taken, for example a shard index or a run directory that is in use."""

    code = "PS120"


class JobDone(PsError):
    """The run is complete. For the process that gets this error, that is a success."""

    code = "PS127"


class JobMismatch(PsError):
    """A process has another job file, plan or version than the coordinator."""

    code = "PS130"


class LaunchFailed(PsError):
    """An engine cannot start the cluster, or has given it up."""

    code = "PS140"


class StaleGeneration(PsError):
    """The message belongs to an older generation, policy or incarnation. The caller has to pull and
    lease again."""

    code = "PS220"


class SegmentLost(StaleGeneration):
    """The peer did not answer and may still use the shared memory. The caller has to abandon that
    memory and join again."""

    code = "PS221"


class RoundPassed(PsError):
    """The shard has passed the requested round, or has dropped the snapshot. The caller has to
    lease again."""

    code = "PS222"


class NotReady(PsError):
    """The peer cannot serve the request yet; the message says why."""

    code = "PS210"
    retryable = True
    sent = False


class Forming(NotReady):
    """The coordinator forms a generation of all shards; no process is missing."""

    code = "PS211"


class Preparing(NotReady):
    """The coordinator is alive and still reads its job. A caller should ask again, even one that
    gives up early if a coordinator is silent."""

    code = "PS215"


class Stalled(PsError):
    """Announced tensors stopped arriving, so the shard took back their buffer. Nothing changed."""

    code = "PS217"
    retryable = True
    sent = False


class ShardUnreachable(PsError):
    """A shard does not answer within the deadline of a call."""

    code = "PS202"
    retryable = True


class CoordinatorUnreachable(PsError):
    """The coordinator does not answer within the deadline."""

    code = "PS201"
    retryable = True


class CoordinatorRefuses(CoordinatorUnreachable):
    """A coordinator answers that it will not start. A process that has part of a run treats this
    like silence and waits for a coordinator that serves the run."""

    code = "PS216"


class OutcomeUnknown(PsError):
    """A push or commit got no answer in time and may have taken effect. Repeating it is safe,
    because the peer recognizes repetitions."""

    code = "PS206"
    retryable = True


class AccessDenied(PsError):
    """The peer rejects the identity of this process, or its right to make this call."""

    code = "PS301"


class ResourceExhausted(PsError):
    """A bound was reached, for example of staged attempts, snapshots, waiting calls, or the size of
    a message."""

    code = "PS501"


class TableFull(ResourceExhausted):
    """An embedding table has ``max_rows`` rows already, and the job needs more."""

    code = "PS508"


class CheckpointError(PsError):
    """A checkpoint could not be written, or one of its files is missing, torn or changed."""

    code = "PS401"


class JobFailed(PsError):
    """The job cannot continue. The message is the reason, and every process prints it."""

    code = "PS601"


class PortInUse(PsError):
    """The address to listen on cannot be used, for example because another process has it."""

    code = "PS208"


class Unreachable(PsError):
    """The connection failed: closed port, refused, or broken."""

    code = "PS203"
    retryable = True


class NotConnected(Unreachable):
    """No connection could be made, so the request was not sent."""

    code = "PS204"
    sent = False


class DeadlinePassed(PsError):
    """A call exceeded its deadline and may have taken effect."""

    code = "PS205"
    retryable = True


class RemoteFailure(PsError):
    """The peer failed unexpectedly; its log has the details."""

    code = "PS690"
