"""Tracks snapshots: which were ordered, which shards have taken them, which are kept.

Pure: the engine's loop is the only caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.core.run import Followed
from coordinator.core.wording import shards
from psrpc.checkpoint.manifest import TEMPORARY
from psrpc.core.commands import SnapshotOrder
from psrpc.core.errors import InvalidArgument
from psrpc.core.names import CHECKPOINTS
from psrpc.core.shard_reports import ShardFile

MAX_KEPT = 3
"""Snapshots that shards may hold in memory: two of epochs and the final one."""


def checkpoint_name(step: int, generation: int = 1) -> str:
    """Returns the name of a global step's checkpoint, unique over generations. Load-bearing."""
    return f"step-{step:08d}{suffix(generation)}"


def is_checkpoint(snapshot: str) -> bool:
    """Whether a snapshot of this name is a checkpoint, not just kept for evaluation."""
    return snapshot.startswith("step-")


def suffix(generation: int) -> str:
    """Returns the suffix that makes the snapshot names of a later generation unique; empty for the
    first."""
    return f".g{generation}" if generation > 1 else ""


def temporary_directory(name: str) -> str:
    """Returns where shards write a checkpoint before its commit, relative to the run directory."""
    return f"{CHECKPOINTS}/{TEMPORARY}{name}"


@dataclass(frozen=True, slots=True)
class Taken:
    """A snapshot that every shard has taken; ``files`` by shard index. ``under`` was the policy in
    force; None if it was always the run's."""

    order: SnapshotOrder
    files: tuple[ShardFile, ...]
    under: Followed | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A snapshot that a shard could not take or write."""

    order: SnapshotOrder
    reason: str


@dataclass(slots=True)
class _Pending:
    order: SnapshotOrder
    by_decision: bool
    files: dict[int, ShardFile] = field(default_factory=dict)


class Snapshots:
    """The snapshots of one run, by name. Not thread-safe."""

    def __init__(self, shards: int, under: Followed | None = None) -> None:
        """``under`` is the policy in force."""
        self._shards = shards
        self._under = under
        self._pending: dict[str, _Pending] = {}
        self._known: set[str] = set()
        self._kept: list[str] = []
        self._released: list[str] = []
        self._writing: set[str] = set()

    @property
    def writing(self) -> int:
        """Number of checkpoints being written, or written and not yet committed."""
        return len(self._writing)

    @property
    def pending(self) -> tuple[SnapshotOrder, ...]:
        """The orders that not every shard has carried out."""
        return tuple(pending.order for pending in self._pending.values())

    @property
    def room(self) -> int:
        """Number of snapshots that the shards may keep besides the present ones."""
        return MAX_KEPT - len(self._kept)

    @property
    def released(self) -> tuple[str, ...]:
        """The last few names that were released, for shards that missed it."""
        return tuple(self._released)

    def order(self, order: SnapshotOrder, by_decision: bool = False) -> None:
        """Records an order, sent in a round's decision or as a command of its own."""
        assert order.name not in self._known
        assert not order.keep or self.room > 0
        self._known.add(order.name)
        self._pending[order.name] = _Pending(order, by_decision)
        if order.keep:
            self._kept.append(order.name)
        if order.write:
            self._writing.add(order.name)

    def withdraw(self, name: str) -> None:
        """Drops a recorded order that will not be sent after all."""
        del self._pending[name]

    def report(self, name: str, file: ShardFile, error: str) -> Taken | Failed | None:
        """Records a shard's report; None while others are missing, or for a repetition.

        Raises:
            InvalidArgument: no such snapshot was ordered.
        """
        if name not in self._known:
            raise InvalidArgument(f"snapshot {name!r} was not ordered")
        pending = self._pending.get(name)
        if pending is None:
            return None
        if error:
            del self._pending[name]
            self._writing.discard(name)
            return Failed(pending.order, f"shard {file.shard}: {error}")
        pending.files[file.shard] = file
        if len(pending.files) < self._shards:
            return None
        del self._pending[name]
        files = tuple(pending.files[k] for k in range(self._shards))
        return Taken(pending.order, files, self._under)

    def written(self, name: str) -> None:
        """Notes that the manifest is committed, or that the attempt has failed."""
        self._writing.discard(name)

    def release(self, name: str) -> bool:
        """Releases a snapshot; returns whether it was kept."""
        if name not in self._kept:
            return False
        self._kept.remove(name)
        self._released = [*self._released, name][-MAX_KEPT:]
        return True

    def lacking(self, shard: int) -> list[SnapshotOrder]:
        """Returns the orders that ``shard`` has not reported, except those in decisions: only with
        the decision do they apply to the right version."""
        return [
            p.order for p in self._pending.values() if not p.by_decision and shard not in p.files
        ]

    def waiting_for(self) -> str:
        """Says which shards a snapshot waits for; empty when none is pending."""
        parts = []
        for name, pending in self._pending.items():
            missing = [shard for shard in range(self._shards) if shard not in pending.files]
            parts.append(f"snapshot {name} of {shards(missing)}")
        return "; ".join(parts)
