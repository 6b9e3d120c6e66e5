"""Derives the initial work of a generation from the batches that its shards have. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.core.applied import common_positions, partial_positions
from coordinator.core.run import Run, global_step
from coordinator.schedule.ledger import Ledger
from coordinator.schedule.micro_batch import Tally
from coordinator.schedule.open_batches import count_batches
from coordinator.schedule.rounds import Rounds
from psrpc.core.shard_reports import Positions


@dataclass(frozen=True, slots=True)
class InitialWork:
    """The positions per epoch that all shards have (``done``), those of them that were recorded
    without an update (``skipped``), and those that only some shards have (``partial``)."""

    done: Positions
    skipped: Positions
    partial: Positions

    @staticmethod
    def of(applied: Sequence[Positions], skipped: Sequence[Positions]) -> InitialWork:
        """Combines the applied-sets of the shards, and the skipped part of each."""
        done = common_positions(applied)
        return InitialWork(done, common_positions(skipped), partial_positions(applied, done))

    def batches_skipped(self, run: Run) -> int:
        """Counts the skipped batches."""
        unit = run.description.unit
        return sum(count_batches(positions, unit) for positions in self.skipped.values())

    def schedule(
        self, run: Run, version: int, tally: Tally, limit: int | None = None
    ) -> Ledger | Rounds:
        """Returns the schedule of the batches left to do in the generation of ``run``, whose shards
        have this ``version``, in rounds; ``limit`` is that of an attended job, in batches."""
        description = run.description
        # If an epoch depends on the previous one's results, it is opened later.
        until = 0 if description.paced else run.rule.epoch if run.rule else None
        if run.settings.rounds:
            return Rounds(
                records=description.train_records,
                batch_size=description.unit,
                epochs=description.epochs,
                policy=run.settings,
                generation=run.generation,
                done=self.done,
                partial=self.partial,
                first_round=version,
                first_attempt=run.first_attempt,
                skipped_records=sum(len(positions) for positions in self.skipped.values()),
                until_epoch=until,
                limit=limit,
                tally=tally,
                exact=description.exact,
            )
        batches = sum(count_batches(p, description.unit) for p in self.done.values())
        step = global_step(run.followed, batches, description.per_epoch)
        return Ledger(
            records=description.train_records,
            batch_size=description.unit,
            epochs=description.epochs,
            policy=run.settings,
            first_attempt=run.first_attempt,
            done=self.done,
            skipped=self.skipped,
            partial=self.partial,
            step_offset=step - batches,
            until_epoch=until,
            limit=limit,
            tally=tally,
        )
