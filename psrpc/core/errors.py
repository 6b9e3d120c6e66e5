"""The one tree of errors of this project.

``psrpc.wire.status`` maps each class to a gRPC status and back, so an error raised in a server
arrives at the client as the same class. A message names the thing, the value and what was expected.

Every error has a code, which has a section in ``docs/errors.md``: ``PS1xx`` the job and what was
typed, ``PS2xx`` the network, ``PS3xx`` who may speak, ``PS4xx`` data and checkpoints, ``PS5xx``
memory, disk and devices, ``PS6xx`` training. A class has one, and an error has another of its own
where another thing has to be done about it.
"""

from __future__ import annotations

import errno
import re

_CODED = re.compile(r"(PS\d{3}): ")


class PsError(Exception):
    """Root of all errors that a user may see.

    ``retryable`` says whether trying again may help; ``sent`` is False when the request has surely
    changed nothing at the peer; ``code`` is its section in ``docs/errors.md``.
    """

    retryable = False
    sent = True
    code = "PS699"

    ag_pass_through = True
    """TensorFlow's AutoGraph raises it as it is, and not an error of its own with its text."""

    def __init__(self, message: str = "", *, code: str = "") -> None:
        """An error of the class's code, or of ``code``, or of the one that ``message`` begins with:
        so it stays what it was where only its text is kept, as in a job's reason to fail."""
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
    """The code of an ``OSError`` or ``sqlite3.Error``: the disk is full, this process may not use
    the file, or the disk fails."""
    name = getattr(error, "sqlite_errorname", "")
    kind = name.partition("_")[2] and "_".join(name.split("_")[:2])
    why = getattr(error, "errno", None) or kind
    return "PS502" if why in _FULL else "PS503" if why in _FORBIDDEN else "PS504"


_DISK_ADVICE = {
    "PS502": "; make room there",
    "PS503": "; let this user write there (`ls -ld` shows owner and mode), or choose another place",
}


def disk_reason(error: OSError) -> str:
    """The system's own words, and what to do where they are always the same."""
    return f"{error.strerror or error}{_DISK_ADVICE.get(disk_code(error), '')}"


def error_line(error: PsError, before: str = "") -> str:
    """What a command says on standard error when it ends: ``"error PS204: ..."``, with ``before``
    in front of the message."""
    return f"error {error.code}: {before}{error}"


class InvalidJob(PsError):
    """The job file, an override or the model cannot be used; nothing was started."""

    code = "PS101"


class InvalidSetting(InvalidJob):
    """A field of the job, or a setting of its policy, has a value that it cannot have."""

    code = "PS105"


class InvalidData(InvalidJob):
    """The job's data cannot be read, or is not what it was said to be."""

    code = "PS106"


class InvalidArgument(PsError):
    """A request is malformed: unknown arena, wrong length, garbage. Nothing was changed."""

    code = "PS110"


class AlreadyExists(PsError):
    """The place is taken: two shards with one index, a run directory in use."""

    code = "PS120"


class JobDone(PsError):
    """The run has nothing left to do: a process that finds it so has succeeded."""

    code = "PS127"


class JobMismatch(PsError):
    """A process brings another job file, plan or version than the coordinator's."""

    code = "PS130"


class StaleGeneration(PsError):
    """The message belongs to an older generation, policy or incarnation: pull and lease again."""

    code = "PS220"


class SegmentLost(StaleGeneration):
    """An exchange through shared memory got no answer, so the peer may still use that memory: give
    it up and join again."""

    code = "PS221"


class RoundPassed(PsError):
    """The shard has gone past the round that was named, or has let go of the snapshot: lease
    again."""

    code = "PS222"


class NotReady(PsError):
    """Something has to happen first; the message says what is awaited."""

    code = "PS210"
    retryable = True
    sent = False


class Forming(NotReady):
    """All shards are there and a generation is being formed: it takes the time that it takes, and
    nobody has to be started."""

    code = "PS211"


class Preparing(NotReady):
    """The coordinator lives and has yet to read its job: it takes the time that it takes, and the
    caller asks again, however little patience it has with silence."""

    code = "PS215"


class Stalled(PsError):
    """Tensors that were announced stopped coming, so the shard has taken back the buffer that it
    had lent for them. Nothing was changed."""

    code = "PS217"
    retryable = True
    sent = False


class ShardUnreachable(PsError):
    """A shard does not answer within the time a call may take."""

    code = "PS202"
    retryable = True


class CoordinatorUnreachable(PsError):
    """The coordinator does not answer within the time that was allowed."""

    code = "PS201"
    retryable = True


class CoordinatorRefuses(CoordinatorUnreachable):
    """A coordinator answers that it will not start. A process that holds part of a run waits for
    one that serves it, as if nothing answered."""

    code = "PS216"


class OutcomeUnknown(PsError):
    """A push or a commit was sent and not answered within the time that was allowed: whether it
    took effect is not known. Doing it again is safe, since the peer knows what it has."""

    code = "PS206"
    retryable = True


class AccessDenied(PsError):
    """The peer does not accept who this process says that it is, or that it may do this."""

    code = "PS301"


class ResourceExhausted(PsError):
    """A bound was reached: staged attempts, snapshots, waiting calls, the size of a message."""

    code = "PS501"


class TableFull(ResourceExhausted):
    """An embedding table may have no more rows: its ``max_rows`` is too small for the job."""

    code = "PS508"


class CheckpointError(PsError):
    """A checkpoint could not be written, or a file of it is missing, torn or changed."""

    code = "PS401"


class JobFailed(PsError):
    """The job cannot go on; the message is the reason that every process prints."""

    code = "PS601"


class PortInUse(PsError):
    """The address to serve on is taken by another process."""

    code = "PS208"


class Unreachable(PsError):
    """The connection failed: nothing listens, it was refused, or it broke."""

    code = "PS203"
    retryable = True


class NotConnected(Unreachable):
    """No connection could be made, so the request was not sent."""

    code = "PS204"
    sent = False


class DeadlinePassed(PsError):
    """A call took longer than it may; whether it had an effect is not known."""

    code = "PS205"
    retryable = True


class RemoteFailure(PsError):
    """The peer failed in a way it did not foresee; its log has the details."""

    code = "PS690"
