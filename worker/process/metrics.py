"""A worker's figures as Prometheus wants them: ``worker_*``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from psrpc.core.version import SOFTWARE
from psrpc.metrics.exporter import Family
from psrpc.v1 import coordinator_pb2 as pb

CAUSES = ("data", "compute", "barrier", "network", "apply")
"""What a worker's time goes to, see ``WorkerTimes``."""


def families(
    worker: str, generation: int, waiting_for: str, steps: int, times: pb.WorkerTimes
) -> Iterator[Family]:
    """All metrics of a worker.

    Args:
        worker: its name; empty before it has one.
        waiting_for: in words; empty when it works.
        steps: that this process has done.
        times: where its time went.
    """
    info = GaugeMetricFamily(
        "worker_info", "Always 1; the name is the coordinator's.", labels=("worker", "version")
    )
    info.add_metric((worker, SOFTWARE), 1)
    yield info
    yield CounterMetricFamily("worker_steps", "Steps that came to their end.", value=steps)
    seconds = CounterMetricFamily(
        "worker_seconds", "Time by what it went to, of steps and between them.", labels=("cause",)
    )
    for cause in CAUSES:
        seconds.add_metric((cause,), getattr(times, cause))
    yield seconds
    yield GaugeMetricFamily("worker_generation", "Of the job.", value=generation)
    yield GaugeMetricFamily(
        "worker_waiting", "Whether it waits for somebody.", value=bool(waiting_for)
    )
