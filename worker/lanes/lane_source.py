"""Computes one micro-batch on each device of a worker, all at the same parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId
from psrpc.core.encoding import Gradient, wire_encoding
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from worker.embedding.row_sets import ReceivedRows
from worker.job.job import Job
from worker.job.loader import user_code
from worker.job.phases import phases_of
from worker.lanes.collective_sum import CollectiveSum
from worker.model.placement import is_spread
from worker.protocol.conduct import ONE_CLOCK
from worker.runtime.devices import HOST, Device
from worker.runtime.trace import TRACING, graph_function
from worker.runtime.waits import WorkerWaits
from worker.step.arenas import DeviceResult, StepResult
from worker.step.compute import GradientComputer
from worker.step.flat import StepInput
from worker.step.gradient_source import GradientResult
from worker.step.keras_source import KerasSource
from worker.step.layout import Layout
from worker.step.replica import Replica

_EACH = "start a worker for each device (--gpu 0, --gpu 1)"


def check_lanes(job: Job, device: Device) -> None:
    """Refuses a job that cannot compute a micro-batch on each of several devices. Raises
    InvalidArgument."""
    phases = phases_of(job)
    policies = [policy for policy in (phases.first, phases.then) if policy is not None]
    if any(policy.mode == "ssp" for policy in policies):
        raise InvalidArgument(ONE_CLOCK, code="PS506")
    if job.local_steps > 1:
        raise InvalidArgument(
            f"local_steps={job.local_steps} and several devices in a worker exclude each other: "
            f"local steps have parameters of their own; {_EACH}",
            code="PS506",
        )
    most = max(policy.open if policy.rounds else len(device.names) for policy in policies)
    if most < len(device.names):
        raise InvalidArgument(
            f"this worker has {', '.join(device.names)}, and a round has {most} "
            f"{'micro-batch' if most == 1 else 'micro-batches'}; give the worker {most} at most, "
            f"or say --replicas {len(device.names)}",
            code="PS506",
        )


def make_source(
    job: Job, device: Device, waits: WorkerWaits, optimizer_arguments: Mapping[str, str]
) -> KerasSource:
    """Makes the source of a worker: a :class:`LaneSource` if ``device`` has several and the job
    does not spread its model over them. For the arguments see KerasSource."""
    make = LaneSource if device.others and job.devices is None else KerasSource
    return make(job, device, waits, optimizer_arguments)


class LaneSource(KerasSource):
    """A :class:`worker.step.keras_source.KerasSource` with a lane for each device: a compiled step
    and a thread. All lanes share the model, the data and the parameters that the worker received,
    of which each copies those of a step to its device. Each has its own residual of compression, as
    a worker of its own would have.

    A model that itself says ``tf.device`` for another device than the first keeps all devices for
    one micro-batch, without lanes. So does a model with embedding tables; where it leaves a device
    idle, the step refuses that.
    """

    def __init__(
        self,
        job: Job,
        device: Device,
        waits: WorkerWaits,
        optimizer_arguments: Mapping[str, str] | None = None,
    ) -> None:
        """``device`` has several; for the others see KerasSource."""
        super().__init__(job, device, waits, optimizer_arguments)
        self._devices = device
        self._lanes: Sequence[GradientComputer] = ()
        """Empty before the first plan, and for a model that is spread over the devices."""
        self._lane_of: dict[BatchId, int] = {}
        self._sum: CollectiveSum | None = None
        self._threads = self._opened.enter_context(
            ThreadPoolExecutor(len(device.others), thread_name_prefix="lane")
        )

    @property
    def at_once(self) -> int:
        """See GradientSource, also for the other methods."""
        return max(1, len(self._lanes))

    @property
    def sums(self) -> bool:
        return self._job.sum_devices

    def prepare(self, plan: Plan, workspace: Workspace) -> None:
        super().prepare(plan, workspace)
        for lane in self._lanes[1:]:
            lane.renew(workspace)

    def _use(self, plan: Plan) -> None:
        self._lanes = ()
        others: Sequence[Device] = ()
        self._device = self._reading = self._devices
        self._ahead = 2
        if not _is_spread(self._replica, plan, self._devices):
            check_lanes(self._job, self._devices)
            self._device, *others = self._devices.each
            # A batch is read before it is known which device computes it.
            self._reading = Device(HOST, "cpu")
            self._ahead = 2 * len(self._devices.names)
        super()._use(plan)
        read, waits = self._reader(plan), self._waits
        lanes = [GradientComputer(self._replica, plan, each, read, waits) for each in others]
        if lanes:
            self._lanes = (self._made, *lanes)
            layout = Layout(plan, wire_encoding(self._job.wire_dtype))
            self._sum = CollectiveSum(layout, self._devices.names)

    def leave(self) -> None:
        super().leave()
        self._lane_of.clear()
        for lane in self._lanes[1:]:
            lane.leave()

    def gradient(
        self, batch: BatchId, given: Any, rows: ReceivedRows | None = None
    ) -> GradientResult:
        if self._lanes:
            return self._run(0, batch, given)
        return super().gradient(batch, given, rows)

    def gradients(
        self, batches: Sequence[BatchId], given: Sequence[Any], /
    ) -> Sequence[StepResult | DeviceResult]:
        pairs = list(enumerate(zip(batches, given, strict=True)))
        if not all(self._lanes[index].compiled(one) for index, (_, one) in pairs):
            # Only one thread at a time may trace a model.
            return [self._run(index, batch, one) for index, (batch, one) in pairs]
        futures = [
            self._threads.submit(self._run, index, batch, one) for index, (batch, one) in pairs[1:]
        ]
        try:
            first = self._run(0, batches[0], given[0])
        finally:
            # No lane may still compute when this returns or raises.
            failed = [future.exception() for future in futures]
        for error in filter(None, failed):
            raise error
        return [first, *(future.result() for future in futures)]

    def _run(self, index: int, batch: BatchId, given: StepInput) -> StepResult | DeviceResult:
        self._lane_of[batch] = index
        device, lane = self._devices.each[index], self._lanes[index]
        if not device.is_host:
            given = StepInput(device.take(given.seeds), device.take(given.batch))
        return lane.on_device(batch, given) if self.sums else lane.gradient(batch, given)

    def add(self, results: Sequence[GradientResult]) -> tuple[Gradient, ...]:
        assert self._sum is not None  # prepare makes it
        return self._sum([each for each in results if isinstance(each, DeviceResult)])

    def swap(self, version: int) -> None:
        super().swap(version)
        for lane in self._lanes[1:]:
            lane.swap(version)

    def settle(self, unused: Iterable[int] = (), batch: BatchId | None = None) -> None:
        if batch is None:
            # The last one, and there is no other.
            self._lane_of.clear()
        index = self._lane_of.pop(batch, 0) if batch is not None else 0
        self._computers[index].settle(unused)

    def take_back(self, batch: BatchId | None = None) -> None:
        if batch is not None:
            self._computers[self._lane_of.pop(batch, 0)].take_back()
            return
        self._lane_of.clear()
        for each in self._computers:
            each.take_back()

    @property
    def _computers(self) -> Sequence[GradientComputer]:
        return self._lanes or (self._made,)


def _is_spread(replica: Replica, plan: Plan, device: Device) -> bool:
    """Whether the model itself asks for a device of this worker besides the first, in training or
    in inference, or has tables; traces both to find out. Raises InvalidJob if that fails."""
    if plan.tables:
        # Rows are fetched for one micro-batch at a time.
        return True
    step = replica.make_step(plan)
    values = [tf.TensorSpec(spec.shape, spec.dtype) for spec in plan.variables]
    batch = Device(HOST, "cpu").place(replica.example)
    seeds = tf.TensorSpec((replica.num_seeds(), 2), tf.int64)

    def both(seeds: tf.Tensor, batch: Any, *values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        trained, _ = step.differentiate(values, seeds, batch)
        return trained, step.loss(values, batch)[0]

    with TRACING, user_code("the training step"):
        traced = graph_function(both).get_concrete_function(seeds, batch, *values)
        return is_spread(traced.graph, device)
