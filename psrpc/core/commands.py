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
"""Load-bearing, see :mod:`psrpc.security.signatures`."""


@dataclass(frozen=True, order=True, slots=True)
class Attempt:
    """One try at a batch; ``number`` is unique in a job and rises. Load-bearing: the coordinator
    stores decisions with the names of these fields and those of :class:`SnapshotOrder`."""

    batch: BatchId
    number: int

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.batch}"


@dataclass(frozen=True, slots=True)
class SnapshotOrder:
    """Orders the shards to freeze their state under ``name``: to ``write`` it into ``directory``
    (relative to the run directory), to ``keep`` it for pulls until its release, or both. ``base``
    is the checkpoint, also relative, whose rows of tables a shard may extend, up to ``parts``
    files."""

    name: str
    global_step: int
    write: bool = False
    keep: bool = False
    directory: str = ""
    base: str = ""
    parts: int = FULL_EVERY


@dataclass(frozen=True, slots=True)
class Decision:
    """A decided round: exactly ``attempts``, in batch-id order, turn version ``round`` into
    ``round + 1``."""

    generation: int
    round: int
    attempts: tuple[Attempt, ...]
    snapshots: tuple[SnapshotOrder, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundsAhead:
    """Decides rounds before their gradients are there, in rising order and all of one generation. A
    shard applies each on its own, once it is at that round and all shards hold every attempt that
    the decision names. It forgets them when it begins, when a revocation says so and when it opens
    a command stream."""

    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class WorkerClock:
    """Ssp: others wait for ``worker`` since change ``entry``; it has done at least ``steps``
    steps, as others count them. ``proof`` is the coordinator's, where a worker brings the clock."""

    worker: str
    entry: int
    steps: int
    proof: bytes = field(default=b"", compare=False)


@dataclass(frozen=True, slots=True)
class AwaitedWorkers:
    """Tells the shards which workers others wait for after change ``number`` (ssp). A shard notes
    it unless it knows a later one."""

    number: int
    workers: tuple[WorkerClock, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Orders the shards to drop a kept snapshot."""

    name: str


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys with which a shard checks its callers, for one generation; validated when made.

    Attributes:
        verify: the public key of sessions and decisions, Ed25519.
        grant: the key of grants, which is a secret of coordinator and shards.

    Raises:
        InvalidArgument: one of them is not :data:`KEY_BYTES` long.
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
    """Orders one shard to stand at ``generation``: with its present state (``keep``, after
    ``decision``, if that is of the shard's round), with the checkpoint ``restore`` (relative to the
    run directory), or else empty. ``settings`` is the policy of number ``policy``; without them the
    shard's stays. ``version``, if given, becomes the shard's; the next two set the learning rate,
    see the message of the same name. The coordinator adds ``keys`` as it sends the order."""

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
    """Orders the shards to refuse a departed worker, and to drop these of its attempts. With
    ``ends_ahead`` also to apply no more rounds that were decided ahead, since some contain its
    batches."""

    number: int
    worker: str
    attempts: tuple[Attempt, ...] = ()
    ends_ahead: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """Tells a process that the job is over; ``reason`` says why it failed, or was stopped."""

    failed: bool
    reason: str = ""


Command: TypeAlias = (
    Decision | RoundsAhead | AwaitedWorkers | SnapshotOrder | Release | Begin | Revocation | Ended
)
