"""A whole coordinator with a worker that does whatever it gets."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.core.work import (
    EvaluationWork,
    MergeWork,
    MetricVariable,
    Round,
    Train,
    Wait,
    Work,
)
from psrpc.core.commands import Ended
from psrpc.core.errors import StaleGeneration
from tests.coordinator.switching_job import do
from tests.coordinator.whole_coordinator import Coordinator, Worker

LOSSES = [5.0, 4.0, 4.5, 4.5, 4.5, 4.5, 4.5, 4.5, 4.5]
"""Of each epoch's evaluation: the second is the best."""


class Loop:
    """A worker that does whatever it gets, and what it has seen."""

    def __init__(self, coordinator: Coordinator, worker: Worker) -> None:
        self.coordinator, self.worker = coordinator, worker
        self.trained: list[int] = []
        """The epoch of each batch, in order."""
        self.rates: dict[int, float] = {}
        """By epoch, what shards multiply the learning rate by while it is trained."""

    def turn(self) -> None:
        self.coordinator.settle()
        self.worker.received = 0
        try:
            self._do(self.worker.lease())
        except StaleGeneration:
            self.worker.join()

    def _do(self, found: Work) -> None:
        coordinator, worker = self.coordinator, self.worker
        engine = coordinator.engine
        if isinstance(found, Round | Train):
            batches = [found.attempt] if isinstance(found, Round) else found.batches
            self.trained += [attempt.batch.epoch for attempt in batches]
            scale = coordinator.shards[0].begins[-1].rate_scale
            for epoch in {attempt.batch.epoch for attempt in batches}:
                assert self.rates.setdefault(epoch, scale) == scale
            do(worker, found)
        elif isinstance(found, EvaluationWork):
            states = (MetricVariable((2,), (0.0, 1.0)),)
            engine.report_evaluated(
                worker.caller, found.evaluation, found.task, found.stop - found.start, states
            )
        elif isinstance(found, MergeWork):
            name = found.evaluation
            done = len(coordinator.job_run.training.schedule.finished_epochs)  # type: ignore[union-attr]
            epoch = done if name == "final" else int(name.removeprefix("epoch-"))
            engine.report_merged(worker.caller, name, {"loss": LOSSES[epoch - 1]})
        else:
            assert isinstance(found, Wait | Ended), found
            coordinator.tick()

    def run(self, until: Callable[[], bool] | None = None) -> None:
        for _ in range(600):
            if until() if until else self.coordinator.job_run.phase == "done":
                return
            self.turn()
        raise AssertionError(self.coordinator.job_run.waiting_for())
