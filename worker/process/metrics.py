"""A worker's Prometheus metrics, ``worker_*``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from psrpc.core.version import SOFTWARE
from psrpc.metrics.exporter import Family
from psrpc.v1 import coordinator_pb2 as pb

CAUSES = ("data", "compute", "barrier", "network", "apply")
"""The causes that a worker's time counts towards, see ``WorkerTimes``."""


def families(
    worker: str, generation: int, waiting_for: str, steps: int, times: pb.WorkerTimes
) -> Iterator[Family]:
    """Yields all metrics of a worker.

    Args:
        worker: its name; empty before it has one.
        waiting_for: a description; empty while it works.
        steps: the number of finished steps of this process.
        times: where its time went.
    """
    info = GaugeMetricFamily(
        "worker_info", "Always 1; the name is the coordinator's.", labels=("worker", "version")
    )
    info.add_metric((worker, SOFTWARE), 1)
    yield info
    yield CounterMetricFamily("worker_steps", "Finished steps.", value=steps)
    seconds = CounterMetricFamily(
        "worker_seconds", "Time in and between steps, by cause.", labels=("cause",)
    )
    for cause in CAUSES:
        seconds.add_metric((cause,), getattr(times, cause))
    yield seconds
    yield GaugeMetricFamily("worker_generation", "The generation of the job.", value=generation)
    yield GaugeMetricFamily(
        "worker_waiting", "Whether it waits for a peer.", value=bool(waiting_for)
    )
