"""Gradients of batches at the parameters that were received last."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType

import numpy as np

from pserver.workspace import Workspace
from psrpc.batch import BatchId
from psrpc.encoding import wire_encoding
from psrpc.plan import Plan
from worker.buffers import ParameterBuffers
from worker.compression import Compressor
from worker.devices import Device
from worker.feed import Feed
from worker.flat import FlatStep, StepInput, StepResult
from worker.job import Job
from worker.loader import user_code
from worker.replica import Replica
from worker.seeds import seed_state
from worker.waits import Waits


class BatchReader:
    """Reads training batches and puts them where the step wants them. Thread-safe."""

    def __init__(self, job: Job, device: Device, num_seeds: int) -> None:
        self._job = job
        self._device = device
        self._num_seeds = num_seeds
        (self._no_seeds,) = device.place((np.zeros((0, 2), np.int64),))

    def __call__(self, batch: BatchId) -> StepInput:
        """Raises InvalidJob where the data source fails."""
        with user_code("train"):
            records = self._job.train.read(self._job.seed, batch)
        if not self._num_seeds:
            return StepInput(self._no_seeds, self._device.place(records))
        states = [seed_state(self._job.seed, batch, i) for i in range(self._num_seeds)]
        return StepInput(*self._device.place((np.array(states, np.int64), records)))


class Compute:
    """The model's step, its data and its parameters. One thread uses it.

    Parameters are received into ``spare`` while the results of the last step, which may alias
    the current ones, are still on their way; ``swap`` then makes the spare set current. Both are
    sets of a workspace: ``renew`` comes before anything that has to do with parameters.
    """

    spare: ParameterBuffers

    def __init__(
        self,
        replica: Replica,
        plan: Plan,
        device: Device,
        read: Callable[[BatchId], StepInput],
        waits: Waits,
    ) -> None:
        job = replica.job
        self._waits = waits
        self._shards = range(plan.shards)
        self._compressor = Compressor(plan, job.compression, job.topk) if job.compression else None
        wire = wire_encoding(job.wire_dtype)
        self._step = FlatStep(replica.make_step(plan), plan, device, wire, self._compressor)
        self._feed = Feed(read)
        self._current: ParameterBuffers

    def __enter__(self) -> Compute:
        self._feed.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._feed.__exit__(kind, error, traceback)

    def renew(self, workspace: Workspace) -> None:
        """Receives parameters there from now on."""
        self._current, self.spare = map(ParameterBuffers, workspace.sets)

    def leave(self) -> None:
        """Lets go of the workspace and of what was expected, to join anew.

        What compression has left out is dropped: nobody can say whether the last gradient was
        used, and batches that shards have lost will be done again.
        """
        self._current = self.spare = ParameterBuffers({})
        self.forget()
        if self._compressor is not None:
            self._compressor.forget()

    def settle(self, unused: Iterable[int] = ()) -> None:
        """The last gradient was used by all shards but ``unused``, which never will use it. To be
        said before the next is computed, since what compression left out goes into that."""
        if self._compressor is not None:
            self._compressor.settle(unused)

    def take_back(self) -> None:
        """No shard has used the last gradient, if it was not settled, and none will."""
        self.settle(self._shards)

    def swap(self) -> None:
        """The spare parameters have been received: compute with them from now on."""
        self._current, self.spare = self.spare, self._current

    def expect(self, batches: Iterable[BatchId]) -> None:
        """These batches come next; they are read ahead."""
        self._feed.expect(batches)

    def forget(self) -> None:
        """What was expected does not come."""
        self._feed.forget()

    def read(self, batch: BatchId) -> StepInput:
        """The data of ``batch``, waited for where it was not read ahead.

        Raises:
            InvalidJob: the data source failed; the message says how.
        """
        with self._waits.on("the training data"):
            return self._feed.get(batch)

    def gradient(self, batch: BatchId, given: StepInput) -> StepResult:
        """The gradient of ``batch``, as ``read`` gave it, at the current parameters. Valid until
        the second ``swap``.

        Raises:
            InvalidJob: the step failed; the message says how.
        """
        try:
            return self._step(self._current.tensors, given)
        except Exception:
            with user_code(f"the training step on {batch}"):
                raise
