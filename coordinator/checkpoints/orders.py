"""The snapshots of one generation: ordered, taken by all shards, committed or given up.

Deterministic: orders go out through ``send``; the disk is the only other side effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.checkpoints.cadence import Cadence
from coordinator.checkpoints.disk import DiskWork
from coordinator.checkpoints.saving import Saving
from coordinator.checkpoints.snapshots import Failed, Snapshots, Taken
from coordinator.core.run import Run
from coordinator.schedule.evaluation import Evaluations
from psrpc.core.commands import Command, Release, SnapshotOrder
from psrpc.core.errors import CheckpointError
from psrpc.core.names import CHECKPOINTS
from psrpc.ops.logs import get_logger

log = get_logger()


class Orders:
    """The snapshots and evaluations of a generation. ``failure`` says why the job must stop;
    ``warnings`` are for users. Not thread-safe."""

    def __init__(
        self,
        run: Run,
        newest: tuple[str, int, int] | None,
        disk: DiskWork,
        send: Callable[[Command], None],
        cadence: Cadence,
    ) -> None:
        """``newest`` is the checkpoint that was recorded last: name, generation, global step."""
        description = run.description
        saved_step = run.restored.global_step if run.restored else None
        if run.restored is None and newest is not None and newest[1] >= run.since:
            # A checkpoint of another history is not the shards' state, even if its step is the
            # same.
            saved_step = newest[2]
        self.failure: str | None = None
        self.warnings: list[str] = []
        self.evaluations = Evaluations(
            description.eval_records,
            description.batch_size,
            whole=bool(description.unsummed_metrics),
        )
        self.snapshots = Snapshots(run.plan.shards, run.followed[-1])
        self.saving = Saving(
            snapshots=self.snapshots,
            evaluations=self.evaluations,
            cadence=cadence,
            last_epoch=description.epochs - 1,
            evaluates=description.eval_records > 0,
            saved_step=saved_step,
            first_saved=newest is not None or run.restored is not None,
            generation=run.generation,
            writes_epochs=description.keep_best is not None,
            full_every=description.full_checkpoint_every,
        )
        self._has_tables = bool(run.plan.tables)
        if self._has_tables and newest is not None and newest[1] >= run.since:
            self.saving.base = f"{CHECKPOINTS}/{newest[0]}"
        self._cadence = cadence
        self._sync = run.settings.rounds
        self._disk = disk
        self._send = send
        self._written = 0
        """Number of checkpoints ordered."""
        self._unfinished: dict[str, int] = {}
        """Checkpoints neither committed nor given up: name to number."""
        self._saved = 0
        """Greatest number of a committed one; 0 is the generation's initial checkpoint."""
        self._refused = ""
        """Why the last one failed; empty once one is committed."""

    def order_first(self, step: int) -> None:
        """Orders the checkpoint that training begins with, once."""
        order = self.saving.order_first(step)
        if order is not None:
            self._order(order)

    def order_due(self, step: int, trained: bool) -> None:
        """Sends the orders that are due now that the global step is ``step``."""
        while (order := self.saving.next_order(step, trained)) is not None:
            self._order(order)
        self._take_warnings()

    def with_decision(self, step: int, trained: bool) -> tuple[SnapshotOrder, ...]:
        """Returns the orders that the decision of the round ending at ``step`` carries."""
        order = self.saving.next_order(step, trained, by_decision=True)
        self._take_warnings()
        return (order,) if order is not None and self._make_directory(order) else ()

    def request(self, step: int) -> int:
        """Requests a checkpoint of ``step`` or later; returns its number, for :meth:`is_saved`: 0
        where the generation began with one of this step."""
        if self.saving.request(step):
            return self._written + 1
        return 0 if self.saving.began_with(step) else self._written

    def is_saved(self, number: int) -> bool:
        """Whether the checkpoint of this number or a later one, which replaces it, is committed."""
        return number <= self._saved

    def is_lost(self, number: int) -> bool:
        """Whether the checkpoint of this number has failed, and no later one is committed."""
        ordered = number <= self._written and number not in self._unfinished.values()
        return ordered and not self.is_saved(number)

    def checked(self, taken: Taken) -> Taken | Failed:
        """Checks a snapshot that all shards have taken: in sync mode all must be of its round."""
        versions = {file.version for file in taken.files}
        if not self._sync or versions <= {taken.order.global_step}:
            return taken
        return Failed(taken.order, f"shards have taken it at rounds {sorted(versions)}")

    def taken(self, order: SnapshotOrder) -> None:
        """Notes that every shard has a snapshot, and that a checkpoint is committed."""
        self._saved = max(self._saved, self._finished(order))
        self._refused = "" if order.write else self._refused
        if order.write and self._has_tables:
            self.saving.base = f"{CHECKPOINTS}/{order.name}"
        self.saving.taken(order.name)
        if order.write:
            log.info("checkpoint saved", snapshot=order.name, took_s=round(self._cadence.took_s, 3))
        self.evaluations.snapshot_taken(order.name)

    def failed(self, failed: Failed, damaged: bool = False) -> None:
        """Handles a snapshot that a shard could not take or that cannot be committed. One that is
        ``damaged`` was found so when it was read back after its commit; the next checkpoint does
        not continue it, or it would contain the damaged parts."""
        if damaged:
            self.saving.base = ""
        self._finished(failed.order)
        self._refused = failed.reason if failed.order.write else self._refused
        self._disk.discard(failed.order)
        self.release(failed.order.name)
        self.failure = self.failure or self.saving.failed(failed)
        self._take_warnings()

    def withdraw(self, orders: Sequence[SnapshotOrder]) -> None:
        """Withdraws the ``orders`` of a decision that is not made: no shard will take them."""
        for order in orders:
            self.snapshots.withdraw(order.name)
            self.snapshots.release(order.name)
            self._finished(order)
            self.saving.withdrawn(order)
            if order.write:
                self._disk.discard(order)

    def release(self, name: str) -> None:
        """Lets the shards drop a kept snapshot."""
        if self.snapshots.release(name):
            self._send(Release(name))

    def give_up(self) -> None:
        """Ends the generation: discards snapshots not yet taken."""
        for order in self.snapshots.pending:
            self._disk.discard(order)
        self._cadence.given_up()

    def awaited_commit(self) -> str:
        """Describes a requested checkpoint that waits for no shard."""
        failed = f", of which the last failed: {self._refused}" if self._refused else ""
        return f"a checkpoint to be committed{failed}"

    @property
    def releases(self) -> list[Command]:
        """The last releases: a shard that missed one has less room for snapshots than it should."""
        return [Release(name) for name in self.snapshots.released]

    def missed(self, shard: int) -> list[Command]:
        """Returns the commands that a shard may have missed while it had no command stream."""
        # The releases make room first. They are repeated because the shard may take a snapshot only
        # now that is no longer needed.
        return [*self.releases, *self.snapshots.lacking(shard), *self.releases]

    def _order(self, order: SnapshotOrder) -> None:
        if self._make_directory(order):
            log.info("snapshot ordered", snapshot=order.name, write=order.write, keep=order.keep)
            self._send(order)

    def _make_directory(self, order: SnapshotOrder) -> bool:
        """Makes a checkpoint's directory; on failure notes it and returns False."""
        if not order.write:
            return True
        self._written += 1
        self._unfinished[order.name] = self._written
        try:
            self._disk.prepare(order)
        except CheckpointError as error:
            self.snapshots.withdraw(order.name)
            self.failed(Failed(order, error.coded))
            return False
        return True

    def _finished(self, order: SnapshotOrder) -> int:
        """Ends an order; returns its number, 0 if it was not to be written."""
        self.snapshots.written(order.name)
        return self._unfinished.pop(order.name, 0)

    def _take_warnings(self) -> None:
        self.warnings += self.saving.warnings
        self.saving.warnings = []
