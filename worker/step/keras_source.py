"""Computes gradients of a job's model, Keras or ``tf.Module``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId
from psrpc.core.encoding import Encoding, wire_encoding
from psrpc.core.plan import Plan
from psrpc.v1 import coordinator_pb2 as pb
from worker.data.source import Array
from worker.embedding.record_names import not_finite_record
from worker.embedding.row_sets import ReceivedRows
from worker.job.job import Job
from worker.model.build import serialized_optimizer
from worker.model.inputs import whole_inputs
from worker.runtime.devices import Device
from worker.runtime.waits import WorkerWaits
from worker.step.compute import BatchReader, GradientComputer, first_rows_nbytes
from worker.step.evaluator import Evaluator
from worker.step.gradient_source import GradientResult, OneAtOnce, PullSnapshot
from worker.step.initializer import initial_values
from worker.step.local_sgd import LocalSgd
from worker.step.local_steps import LocalReader
from worker.step.replica import Replica


class KerasSource(OneAtOnce):
    """A :class:`worker.step.gradient_source.GradientSource` for Keras models and ``tf.Module``;
    caches the parts that depend on the plan."""

    def __init__(
        self,
        job: Job,
        device: Device,
        waits: WorkerWaits,
        optimizer_arguments: Mapping[str, str] | None = None,
    ) -> None:
        """``optimizer_arguments`` are the settings ``optimizer.*`` as text, for local steps."""
        self.wire: Encoding = wire_encoding(job.wire_dtype)
        self._job = job
        self._device = device
        self._reading = device
        """The device that batches are placed on."""
        self._ahead = 2
        """How many batches are read ahead: two for each that is computed at once."""
        self._waits = waits
        self._optimizer_arguments = optimizer_arguments or {}
        self._opened = ExitStack()
        self._plan: Plan | None = None
        self._evaluator: Evaluator | None = None
        self._replica: Replica
        self._read: tuple[Plan, BatchReader] | None = None
        self._compute: GradientComputer | None = None

    def __enter__(self) -> KerasSource:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._opened.close()

    @property
    def spare(self) -> Mapping[str, Array]:
        """See GradientSource, also for the other methods."""
        return self._made.spare.arrays

    @property
    def exact(self) -> bool:
        return self._job.exact

    def build(self) -> None:
        self._replica = Replica(self._job, self._device.names)

    def rows_nbytes(self, plan: Plan) -> int:
        return first_rows_nbytes(self._job, plan, self._reader(plan)) if plan.tables else 0

    def prepare(self, plan: Plan, workspace: Workspace) -> None:
        if self._plan != plan:
            self._use(plan)
        self._made.renew(workspace)

    def _use(self, plan: Plan) -> None:
        """Makes the parts that depend on the plan."""
        self._compute = self._opened.enter_context(self._make_compute(plan))
        self._evaluator, self._plan = None, plan

    def _make_compute(self, plan: Plan) -> GradientComputer:
        # ``replica.job`` includes what the model is compiled with.
        job, device = self._replica.job, self._device
        read = self._reader(plan)
        if job.local_steps == 1:
            waits, ahead = self._waits, self._ahead
            return GradientComputer(self._replica, plan, device, read, waits, ahead=ahead)
        # The worker runs the job's optimizer; shards only add the differences.
        sgd = LocalSgd.of(serialized_optimizer(job, self._optimizer_arguments, []))
        local = LocalReader(read, job.batch_size)
        return GradientComputer(self._replica, plan, device, local, self._waits, sgd)

    def _reader(self, plan: Plan) -> BatchReader:
        if self._read is None or self._read[0] != plan:
            finder = self._replica.make_finder(plan)
            seeds = self._replica.num_seeds()
            inputs = whole_inputs(self._replica.model)
            self._read = plan, BatchReader(self._job, self._reading, seeds, finder, inputs)
        return self._read[1]

    def leave(self) -> None:
        if self._compute is not None:
            self._compute.leave()

    def initial_values(self, first_rows: str = "", /) -> Mapping[str, Array]:
        assert self._plan is not None  # prepare sets it
        return initial_values(self._replica, self._plan, first_rows)

    def expect(self, batches: Iterable[BatchId]) -> None:
        self._made.feed.expect(batches)

    def forget(self) -> None:
        self._made.feed.forget()

    def waiting(self, now: bool) -> None:
        self._made.feed.waiting(now)

    def read(self, batch: BatchId) -> Any:
        return self._made.read(batch)

    def ahead(self, batch: BatchId) -> Any | None:
        return self._made.feed.peek(batch)

    def place(self, given: Any) -> ReceivedRows | None:
        return self._made.place(given)

    def gradient(
        self, batch: BatchId, given: Any, rows: ReceivedRows | None = None
    ) -> GradientResult:
        return self._made.gradient(batch, given, rows)

    def swap(self, version: int) -> None:
        self._made.swap(version)

    def settle(self, unused: Iterable[int] = (), _batch: BatchId | None = None) -> None:
        self._made.settle(unused)

    def not_finite(self, batch: BatchId) -> str:
        return not_finite_record(self._job.train, self._job.seed, batch)

    def take_back(self, _batch: BatchId | None = None) -> None:
        self._made.take_back()

    def evaluate(
        self, task: pb.EvaluateTask, generation: int, pull: PullSnapshot
    ) -> pb.EvaluateDone:
        return self._evaluates.evaluate(task, generation, pull)

    def merge(self, merge: pb.MergeEvaluation) -> pb.MergeDone:
        return self._evaluates.merge(merge)

    @property
    def _made(self) -> GradientComputer:
        assert self._compute is not None  # prepare makes it
        return self._compute

    @property
    def _evaluates(self) -> Evaluator:
        if self._evaluator is None:
            assert self._plan is not None  # prepare sets it
            self._evaluator = Evaluator(self._replica, self._plan, self._device)
        return self._evaluator
