"""Computes gradients of batches at the parameters received last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId
from psrpc.core.encoding import wire_encoding
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from psrpc.core.text import counted
from psrpc.ops.retry import COMPILING
from worker.data.permutation import seed_state
from worker.data.source import Batch, weighed
from worker.embedding.id_finder import IdFinder
from worker.embedding.record_names import name_in_batch, naming_record
from worker.embedding.row_sets import HEADROOM, ReceivedRows, RowSets, RowSums, rows_nbytes
from worker.job.job import Job
from worker.job.loader import user_code
from worker.model.inputs import check_whole_numbers
from worker.runtime.devices import Device, ParameterBuffers, tensor_of
from worker.runtime.waits import WorkerWaits
from worker.step.arenas import DeviceResult, StepResult, batch_signature
from worker.step.feed import Feed
from worker.step.flat import FlatStep, StepInput
from worker.step.layout import Compressor
from worker.step.local_sgd import LocalSgd
from worker.step.local_steps import LocalSteps
from worker.step.replica import Replica


class BatchReader:
    """Reads training batches and places them on the device. Thread-safe."""

    def __init__(
        self,
        job: Job,
        device: Device,
        num_seeds: int,
        finder: IdFinder | None = None,
        inputs: Sequence[Any] = (),
    ) -> None:
        """Args:
        finder: finds the ids for embedding tables, if there are any.
        inputs: constraints on records, see :func:`worker.model.inputs.whole_inputs`.
        """
        self._inputs = inputs
        self._job = job
        self._finder = finder
        self._device = device
        self._num_seeds = num_seeds
        (self._no_seeds,) = device.place((np.zeros((0, 2), np.int64),))

    def __call__(self, batch: BatchId) -> StepInput:
        """Returns the input of a step. Raises InvalidJob if reading fails, or if the data has
        fractions for an input that takes whole numbers."""
        with user_code("train"):
            records = self._job.train.read(self._job.seed, batch)
            records = weighed(records, self._job.class_weight)
        if self._inputs:
            with user_code(f"the data of {batch}"):
                check_whole_numbers(self._inputs, records[0])
        if not self._num_seeds:
            seeds, placed = self._no_seeds, self._device.place(records)
        else:
            states = [seed_state(self._job.seed, batch, i) for i in range(self._num_seeds)]
            seeds, placed = self._device.place((np.array(states, np.int64), records))
        if self._finder is None:
            return StepInput(seeds, placed)
        with (
            user_code(f"the ids of {batch}"),
            naming_record(
                records[0], batch.count, name_in_batch(self._job.train, self._job.seed, batch)
            ),
        ):
            # The host sums row gradients outside of the step, see FlatStep.
            orders = not self._device.is_host
            return with_ids(self._finder, self._device, seeds, placed, orders=orders)


def with_ids(
    finder: IdFinder, device: Device, seeds: Any, batch: Batch, *, orders: bool = False
) -> StepInput:
    """Returns a step's input with the table ids of ``batch``, which is on ``device``; with
    ``orders`` the step can sum row gradients on the device. Raises InvalidJob if finding the ids
    fails, or an id is outside its table."""
    on_host: Batch = tf.nest.map_structure(device.send, batch, expand_composites=True)
    ids = finder(device.send(seeds), on_host, batch_signature(batch))
    placed = tuple(by.order for by in ids.orders) if orders else ()
    return StepInput(seeds, batch, ids, device.place(ids.places), device.place(placed))


def first_rows_nbytes(job: Job, plan: Plan, read: BatchReader) -> int:
    """Estimates the bytes of a batch's rows from the first batch. Raises InvalidJob if reading the
    batch or finding its ids fails."""
    given = read(BatchId(0, 0, min(job.batch_size, job.train.num_records)))
    assert given.needed is not None  # the plan has tables
    return int(HEADROOM * rows_nbytes(plan.tables, given.needed))


class GradientComputer:
    """The model's step, its data and its parameters. One thread uses it, except :meth:`waiting`.

    Parameters are received into ``spare`` while results of the last step, which may alias the
    current ones, are still being sent; ``swap`` makes the spare set current. Both sets belong to a
    workspace, so ``renew`` must come before any use of parameters.
    """

    spare: ParameterBuffers

    def __init__(
        self,
        replica: Replica,
        plan: Plan,
        device: Device,
        read: Callable[[BatchId], Any],
        waits: WorkerWaits,
        sgd: LocalSgd | None = None,
        ahead: int = 2,
    ) -> None:
        """Args:
        read: a :class:`BatchReader`; with ``sgd`` a ``worker.step.local_steps.LocalReader``.
        sgd: takes the local steps; None for one gradient at a time.
        ahead: how many batches to read ahead, without local steps.
        """
        job = replica.job
        self._tables = plan.tables
        self._waits = waits
        self._compiling = f"{COMPILING} {counted(len(plan.variables), 'variable')}"
        self._shards = range(plan.shards)
        self._compressor = Compressor(plan, job.compression, job.topk) if job.compression else None
        wire = wire_encoding(job.wire_dtype)
        step = replica.make_step(plan, counts=True)
        self._step: FlatStep | LocalSteps
        soft = job.soft_placement
        if sgd is None:
            self._step = FlatStep(step, plan, device, wire, self._compressor, soft_placement=soft)
        else:
            self._step = LocalSteps(
                *(step, plan, device, sgd, job.local_steps, wire, self._compressor),
                soft_placement=soft,
            )
        self._version = 0
        # The input of local steps is as large as several batches.
        self.feed: Feed[Any] = Feed(read, depth=ahead if sgd is None else 1)
        """Reads the batches ahead."""
        self._current: ParameterBuffers
        self._rows: RowSets
        self._sums = RowSums(plan.tables)

    def __enter__(self) -> GradientComputer:
        self.feed.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.feed.__exit__(*exception)

    def renew(self, workspace: Workspace) -> None:
        """Receives parameters into ``workspace`` from now on."""
        self._current, self.spare = map(ParameterBuffers, workspace.sets)
        self._rows = RowSets(self._tables, workspace.row_sets)
        self._sums = RowSums(self._tables, workspace.row_outbox)

    def leave(self) -> None:
        """Releases the workspace, the expected batches and the compression residual, to join anew.

        The residual must go because it is unknown whether the last gradient was used, and because
        batches that shards lost are repeated.
        """
        self._current = self.spare = ParameterBuffers({})
        self._rows = RowSets(self._tables)
        self._sums = RowSums(self._tables)
        self.feed.forget()
        if self._compressor is not None:
            self._compressor.forget()

    def settle(self, unused: Iterable[int] = ()) -> None:
        """Records that all shards but ``unused`` have used or will use the last gradient. Must come
        before the next compression, which adds what was left out."""
        if self._compressor is not None:
            self._compressor.settle(unused)

    def take_back(self) -> None:
        """Records that no shard has used or will use the last gradient, if not settled yet."""
        self.settle(self._shards)

    def swap(self, version: int = 0) -> None:
        """Makes the spare parameters, received at ``version``, current. Local steps count from
        ``version``."""
        self._current, self.spare = self.spare, self._current
        self._version = version

    def read(self, batch: BatchId) -> Any:
        """Returns the data of ``batch``; waits if it was not read ahead. Raises InvalidJob if the
        data source fails."""
        with self._waits.on("the training data"):
            return self.feed.get(batch)

    def compiled(self, given: Any) -> bool:
        """Whether the step is already compiled for the shape of this batch."""
        return self._step.compiled(given)

    def place(self, given: Any) -> ReceivedRows | None:
        """Returns where to receive the rows that a batch needs, given its data; None if it needs
        none. Valid until the call after the next."""
        needed = given.needed if isinstance(given, StepInput) else None
        return None if needed is None else self._rows.place(needed)

    def gradient(self, batch: BatchId, given: Any, rows: ReceivedRows | None = None) -> StepResult:
        """Computes the gradient of ``batch`` at the current parameters and its ``rows``. The result
        is valid until the second ``swap``, its row gradients until the next call. Raises InvalidJob
        if the step fails, InvalidArgument if it asks for other devices than those of this
        worker."""
        with self._running(batch, given):
            if isinstance(self._step, LocalSteps):
                return self._step(self._current.tensors, given, self._version)
            tensors = () if rows is None else tuple(map(tensor_of, rows.values))
            return self._step(self._current.tensors, given, tensors, self._sums)

    def on_device(self, batch: BatchId, given: Any) -> DeviceResult:
        """As :meth:`gradient`, but leaves the gradient on the device. Not for local steps, tables
        or compression."""
        with self._running(batch, given):
            assert isinstance(self._step, FlatStep)
            return self._step.on_device(self._current.tensors, given)

    @contextmanager
    def _running(self, batch: BatchId, given: Any) -> Iterator[None]:
        try:
            with nullcontext() if self.compiled(given) else self._waits.on(self._compiling):
                yield
        except InvalidArgument:
            # Not a fault of the user's code: this worker has other devices than the model asks for.
            raise
        except Exception:
            with user_code(f"the training step on {batch}"):
                raise
