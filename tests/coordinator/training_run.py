"""The work of a run with what goes out of it, without a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.core.run import Run
from coordinator.core.work import Report, Round, Train
from coordinator.records.curves import Curves
from coordinator.records.notes import JobWarnings
from coordinator.records.store import Store
from coordinator.training.training import Training
from psrpc.core.commands import Attempt, Command
from psrpc.ops.clock import ManualClock
from tests.coordinator.builders import QueuedDisk, make_run


class TrainingRun:
    """A Training with what goes out of it."""

    def __init__(self, run: Run, store: Store, attended: bool = False) -> None:
        self.sent: list[Command] = []
        self.on_send: Callable[[Command], None] = self.sent.append
        self.run = run
        self.store = store
        self.curves = Curves(run.run_dir / "tensorboard")
        self.warnings = JobWarnings()
        self.clock = ManualClock()
        self.training = Training(
            run,
            store,
            self.curves,
            lambda c: self.on_send(c),
            QueuedDisk(run),
            self.warnings,
            self.clock,
            attended=attended,
        )

    def begin(self, version: int = 0, generation: int = 1, **changes: Any) -> Training:
        run = replace(self.run, generation=generation, **changes)
        self.training.begin(run, [{}], [{}], version)
        return self.training

    def lease(self, worker: str = "w") -> list[Attempt]:
        work = self.training.lease(worker, 0.0, 10**9, 2)
        if isinstance(work, Round):
            return [work.attempt]
        return list(work.batches) if isinstance(work, Train) else []

    def lease_another(self) -> list[Attempt]:
        return self.lease("another")

    def round(self, loss: float = 1.0, skipped: bool = False) -> None:
        """One worker does a whole round."""
        rounds = self.training.rounds
        assert rounds is not None
        number = rounds.round
        while rounds.round == number:
            [attempt] = self.lease()
            report = Report(attempt.batch, attempt.number, loss, 0, skipped)
            self.training.commit("w", number, report, 0.0)

    def step(self, loss: float = 1.0, **fate: Any) -> None:
        """One worker does one lease (async)."""
        reports = [Report(a.batch, a.number, loss, **fate) for a in self.lease()]
        self.training.record("w", reports, 0.0)


@contextmanager
def training_run(tmp_path: Path, attended: bool = False, **changes: Any) -> Iterator[TrainingRun]:
    with Store(tmp_path / "ledger.sqlite") as store:
        found = TrainingRun(make_run(tmp_path, **changes), store, attended)
        try:
            yield found
        finally:
            found.curves.close()
