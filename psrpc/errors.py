"""The one tree of errors of this project.

``psrpc.status`` maps each class to a gRPC status and back, so an error raised in a server arrives
at the client as the same class. A message names the thing, the value and what was expected.
"""

from __future__ import annotations


class PsError(Exception):
    """Root of all errors that a user may see.

    ``retryable`` says whether trying again may help; ``sent`` is False when the request has surely
    changed nothing at the peer.
    """

    retryable = False
    sent = True


class InvalidJob(PsError):
    """The job file, an override or the model cannot be used; nothing was started."""


class InvalidArgument(PsError):
    """A request is malformed: unknown arena, wrong length, garbage. Nothing was changed."""


class AlreadyExists(PsError):
    """The place is taken: two shards with one index, a run directory in use."""


class JobMismatch(PsError):
    """A process brings another job file, plan or version than the coordinator's."""


class StaleGeneration(PsError):
    """The message belongs to an older generation, policy or incarnation: pull and lease again."""


class SegmentLost(StaleGeneration):
    """An exchange through shared memory got no answer, so the peer may still use that memory: give
    it up and join again."""


class RoundPassed(PsError):
    """The shard has gone past the round that was named: lease again."""


class NotReady(PsError):
    """Something has to happen first; the message says what is awaited."""

    retryable = True
    sent = False


class Forming(NotReady):
    """All shards are there and a generation is being formed: it takes the time that it takes, and
    nobody has to be started."""


class ShardUnreachable(PsError):
    """A shard does not answer within the time a call may take."""

    retryable = True


class CoordinatorUnreachable(PsError):
    """The coordinator does not answer within the time that was allowed."""

    retryable = True


class OutcomeUnknown(PsError):
    """A push or a commit was sent and not answered within the time that was allowed: whether it
    took effect is not known. Doing it again is safe, since the peer knows what it has."""

    retryable = True


class AccessDenied(PsError):
    """The peer does not accept who this process says that it is, or that it may do this."""


class ResourceExhausted(PsError):
    """A bound was reached: staged attempts, snapshots, waiting calls, the size of a message."""


class TableFull(ResourceExhausted):
    """An embedding table may have no more rows: its ``max_rows`` is too small for the job."""


class CheckpointError(PsError):
    """A checkpoint could not be written, or a file of it is missing, torn or changed."""


class JobFailed(PsError):
    """The job cannot go on; the message is the reason that every process prints."""


class PortInUse(PsError):
    """The address to serve on is taken by another process."""


class Unreachable(PsError):
    """The connection failed: nothing listens, it was refused, or it broke."""

    retryable = True


class NotConnected(Unreachable):
    """No connection could be made, so the request was not sent."""

    sent = False


class DeadlinePassed(PsError):
    """A call took longer than it may; whether it had an effect is not known."""

    retryable = True


class RemoteFailure(PsError):
    """The peer failed in a way it did not foresee; its log has the details."""
