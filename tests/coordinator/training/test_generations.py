"""Which checkpoint each generation of a job with tables was restored from, as the ledger has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.checkpoints.choice import Chosen
from coordinator.checkpoints.disk import DiskChoice
from coordinator.core.run import RestoredCheckpoint, Run
from coordinator.records.store import Store
from coordinator.records.stored_values import RESTORED
from coordinator.training.generations import Generations
from psrpc.core.placement import make_plan
from psrpc.core.shard_reports import HeldState
from tests.coordinator.builders import QueuedDisk, make_run
from tests.pserver.snapshots.test_evicted_files import KEEPING


class KnowingDisk(QueuedDisk):
    """Its newest good checkpoint is what a test says."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.newest = DiskChoice(None)

    def choose(self, refused: Mapping[str, str], done: Callable[[DiskChoice], None]) -> None:
        self.start("the choice of a checkpoint", lambda: self.newest, done)


class Cluster:
    """One shard after another, which begin as they are told."""

    def __init__(self, run: Run, store: Store) -> None:
        self.disk = KnowingDisk(run)
        self.generations = Generations(run, store, self.disk, lambda *_: None, lambda: None)
        self.incarnation = 0

    def new_shard(self, checkpoint: tuple[int, int] | None = None) -> None:
        """A process that holds nothing; the newest good checkpoint is of this generation and
        step."""
        self.incarnation += 1
        if checkpoint is not None:
            generation, step = checkpoint
            restored = RestoredCheckpoint(f"step-{step}.g{generation}", step)
            self.disk.newest = DiskChoice(Chosen(restored, "r1", generation, ()))
        self.stands(HeldState(self.incarnation))

    def stands(self, holding: HeldState) -> None:
        self.generations.formation.stands(0, holding)
        if not self.generations.form_if_due():
            self.disk.work()
            assert self.generations.form_if_due()

    def keeps(self) -> None:
        """Its coordinator was started again."""
        generation = self.generations.run.generation
        self.generations.formation.dissolve()
        self.stands(HeldState(self.incarnation, generation, initialized=True))


@pytest.mark.parametrize(
    ("change", "noted"), [({}, True), ({"keep_evicted": False}, True), (None, False)]
)
def test_the_ledger_notes_what_each_generation_went_on_from(
    tmp_path: Path, change: dict[str, Any] | None, noted: bool
) -> None:
    """Also of a table that keeps nothing now: it may do so after a restart."""
    tables = () if change is None else (replace(KEEPING, **change),)
    run = make_run(tmp_path, mode="sync", replicas=1)
    run = replace(run, plan=make_plan(run.description.variables, 1, "cut", tables))
    with Store(tmp_path / "ledger.sqlite") as store:
        cluster = Cluster(run, store)
        cluster.new_shard()  # nothing is there yet
        assert store.get(RESTORED) is None
        cluster.new_shard(checkpoint=(1, 20))
        cluster.keeps()
        cluster.new_shard(checkpoint=(3, 35))
    with Store(tmp_path / "ledger.sqlite") as store:
        assert store.get(RESTORED) == ([[2, 1, 20, []], [4, 3, 35, []]] if noted else None)
