"""The commands that the coordinator gives to shards, as plain values. Both roles use these;
:mod:`psrpc.wire.commands` converts them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidArgument
from psrpc.core.policy import Policy
from psrpc.core.tables import FULL_EVERY

KEY_BYTES = 32
"""Size of a key. Load-bearing, see :mod:`psrpc.security.signatures`."""


@dataclass(frozen=True, order=True, slots=True)
class Attempt:
    """One try to compute a batch. ``number`` is unique in a job; later attempts have larger
    numbers. Load-bearing: the coordinator stores decisions under the names of these fields and
    those of :class:`SnapshotOrder`."""

    batch: BatchId
    number: int

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.batch}"


@dataclass(frozen=True, slots=True)
class SnapshotOrder:
    """Orders the shards to freeze their state under ``name``.

    With ``write`` they write it into ``directory``; with ``keep`` they keep it for pulls until a
    :class:`Release`. ``base`` is the checkpoint whose rows of tables a shard may extend, up to
    ``parts`` files. Both directories are relative to the run directory."""

    name: str
    global_step: int
    write: bool = False
    keep: bool = False
    directory: str = ""
    base: str = ""
    parts: int = FULL_EVERY


@dataclass(frozen=True, slots=True)
class Decision:
    """A decided round: exactly these ``attempts``, in batch-id order, turn version ``round`` of the
    parameters into version ``round + 1``."""

    generation: int
    round: int
    attempts: tuple[Attempt, ...]
    snapshots: tuple[SnapshotOrder, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundsAhead:
    """Decides rounds before their gradients arrive. The rounds ascend and are all of one
    generation.

    A shard applies each of them without another command, as soon as it is at that round and all
    shards have every attempt that the decision names. It forgets these decisions when it begins a
    generation, when a revocation with ``ends_ahead`` arrives, and when it opens a command
    stream."""

    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class WorkerClock:
    """The clock of a worker that others wait for (ssp). ``entry`` is the number of the change since
    which they wait for it. ``steps`` is a lower bound of its steps, in the same count as those of
    the other workers. ``proof`` proves that the coordinator issued the clock, if a worker brings
    it."""

    worker: str
    entry: int
    steps: int
    proof: bytes = field(default=b"", compare=False)


@dataclass(frozen=True, slots=True)
class AwaitedWorkers:
    """Lists the workers that others wait for after change ``number`` (ssp). A shard ignores the
    list if it knows a later one."""

    number: int
    workers: tuple[WorkerClock, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Orders the shards to drop a kept snapshot."""

    name: str


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys with which a shard checks its callers in one generation; checked by the constructor.

    Attributes:
        verify: the Ed25519 public key that verifies sessions and decisions.
        grant: the key of grants; a secret that coordinator and shards share.

    Raises:
        InvalidArgument: a key is not :data:`KEY_BYTES` long.
    """

    verify: bytes
    grant: bytes

    def __post_init__(self) -> None:
        if len(self.verify) != KEY_BYTES or len(self.grant) != KEY_BYTES:
            raise InvalidArgument(
                f"keys of {len(self.verify)} and {len(self.grant)} bytes; expected {KEY_BYTES} each"
            )


@dataclass(frozen=True, slots=True)
class Begin:
    """Orders one shard to begin ``generation``.

    The shard begins with its present state (``keep``), with the checkpoint ``restore`` (relative to
    the run directory), or else empty. If it keeps its state, it first applies ``decision``, if that
    is of its round. ``settings`` is the policy with number ``policy``; if it is None, the shard
    keeps its policy. ``version``, if given, becomes the shard's version. ``rate_scale`` and
    ``warmup_updates`` set the learning rate, see the message of the same name. The coordinator
    fills in ``keys`` when it sends the order."""

    generation: int
    policy: int
    keep: bool = False
    restore: str = ""
    decision: Decision | None = None
    settings: Policy | None = None
    version: int | None = None
    rate_scale: float = 1.0
    warmup_updates: int = 0
    keys: Keys | None = None


@dataclass(frozen=True, slots=True)
class Revocation:
    """Orders the shards to refuse a departed worker and to drop ``attempts`` of it. With
    ``ends_ahead`` they also forget the rounds that were decided ahead, since some of these contain
    its batches."""

    number: int
    worker: str
    attempts: tuple[Attempt, ...] = ()
    ends_ahead: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """Tells a process that the job is over. ``reason`` says why the job failed or was stopped."""

    failed: bool
    reason: str = ""


Command: TypeAlias = (
    Decision | RoundsAhead | AwaitedWorkers | SnapshotOrder | Release | Begin | Revocation | Ended
)
