"""Adds up gradients on the devices that computed them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import tensorflow as tf

from psrpc.core.encoding import Gradient
from worker.runtime.devices import HOST
from worker.runtime.trace import TRACING, Trace, graph_function
from worker.step.arenas import (
    DeviceResult,
    encoded,
    host_arrays,
    plain_buffers,
    power_of,
    step_result,
)
from worker.step.layout import Layout

TIMEOUT_S = 300.0
"""Time limit of a sum. Only a device that is broken reaches it: all of them are of this process."""


PACK_NBYTES = 32 << 20
"""Most bytes that TensorFlow joins for one collective."""


class CollectiveSum:
    """Adds up the gradients of several devices by TensorFlow's collectives: NCCL between GPUs, a
    ring between parts of a CPU. The sums then come to the host from the devices in turn, so that
    each sends a part of them, where it would have sent the whole of its own gradient. Not
    thread-safe."""

    def __init__(self, layout: Layout, devices: tuple[str, ...]) -> None:
        """``layout`` is that of the gradients; ``devices`` are names for TensorFlow."""
        self._layout = layout
        self._devices = devices
        self._traces: dict[int, Trace] = {}
        """By number of gradients: an epoch may end with fewer than there are devices."""

    def __call__(self, results: Sequence[DeviceResult]) -> tuple[Gradient, ...]:
        """Returns, per shard, the sum of finite gradients, those of the first devices in their
        order; of replaced arenas the last value. Empty if an element of a sum is infinite."""
        lanes = [tuple(result.buffers) for result in results]
        trace = self._traces.get(len(lanes))
        if trace is None:
            with TRACING:
                trace = self._traces[len(lanes)] = self._trace(lanes)
        outputs = trace([buffer for lane in lanes for buffer in lane])
        *buffers, power = host_arrays(outputs)
        return step_result(self._layout, None, buffers, 0.0, float(power)).gradients

    def _trace(self, lanes: list[tuple[tf.Tensor, ...]]) -> Trace:
        strategy, devices = _strategy(self._devices), self._devices
        options = tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=PACK_NBYTES, timeout_seconds=TIMEOUT_S
        )
        spans = self._layout.spans
        added = [index for index, span in enumerate(spans) if not span.arena.replaced]
        of_added = [spans[index] for index in added]

        def on_each(*mine: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
            context = tf.distribute.get_replica_context()
            sums = plain_buffers(of_added, mine)
            # TensorFlow joins small tensors to one, which needs them of one type.
            for dtype in sorted({each.dtype.name for each in sums}):
                places = [place for place, each in enumerate(sums) if each.dtype == dtype]
                summands = [sums[place] for place in places]
                reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, summands, options)
                for place, each in zip(places, reduced, strict=True):
                    sums[place] = each
            return encoded(of_added, sums), power_of(sums)

        def add(lanes: list[tuple[tf.Tensor, ...]]) -> list[tf.Tensor]:
            def summand(index: int, device: int) -> tf.Tensor:
                if device < len(lanes):
                    return lanes[device][index]
                with tf.device(devices[device]):
                    return tf.zeros_like(lanes[0][index])

            def of(index: int) -> object:
                return strategy.experimental_distribute_values_from_function(
                    lambda context: summand(index, context.replica_id_in_sync_group)
                )

            sums, powers = strategy.run(on_each, args=[of(index) for index in added])
            total = list(lanes[-1])
            for place, (index, each) in enumerate(zip(added, sums, strict=True)):
                total[index] = strategy.experimental_local_results(each)[place % len(devices)]
            with tf.device(HOST):
                power = strategy.experimental_local_results(powers)[0]
                return [*map(tf.identity, total), tf.identity(power)]

        return Trace(graph_function(add).get_concrete_function(lanes))


@cache
def _strategy(devices: tuple[str, ...]) -> tf.distribute.MirroredStrategy:
    # One for the process: each would number its collectives anew, and TensorFlow knows them by
    # these numbers.
    return tf.distribute.MirroredStrategy(devices)
