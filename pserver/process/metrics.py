"""The Prometheus metrics of a shard, ``pserver_*``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from pserver.core.counters import ShardReport
from pserver.tables.tables import TableFigures
from psrpc.core.version import SOFTWARE
from psrpc.metrics.exporter import Family, histogram

_COUNTERS = {
    "pushes_applied": ("applied", "Gradients that were applied."),
    "pushes_staged": ("staged", "Sync: gradients that were taken for a round."),
    "pushes_repeated": ("already_applied", "Gradients that had been applied before."),
    "pushes_skipped": ("skipped", "Gradients that were not finite and changed nothing."),
    "pushes_refused": ("refused", "Pushes that ended in an error."),
    "pushes_too_stale": ("too_stale", "Gradients staler than max_staleness, not applied."),
    "pushes_uncompensated": ("uncompensated", "Stale gradients applied without a correction."),
    "apply_seconds": ("apply_s", "Time spent in updates."),
    "gradient_bytes": ("gradient_nbytes", "Bytes of received gradients, as encoded."),
}

_TABLE_GAUGES = {"rows": ("rows", "Rows."), "bytes": ("nbytes", "Memory of the table.")}

_TABLE_COUNTERS = {
    "rows_created": ("created", "Rows created by pushes."),
    "rows_evicted": ("evicted", "Rows evicted to make room."),
    "candidates_dropped": ("candidates_dropped", "Ids forgotten before min_count."),
}


def families(
    shard: int, report: ShardReport | None, tables: Sequence[TableFigures]
) -> Iterator[Family]:
    """Yields all metrics of shard ``shard``; without a report only ``info`` and ``ready``."""
    labels, own = ("shard",), (str(shard),)

    def gauge(name: str, meaning: str, value: float) -> Family:
        family = GaugeMetricFamily(f"pserver_{name}", meaning, labels=labels)
        family.add_metric(own, value)
        return family

    info = GaugeMetricFamily("pserver_info", "Always 1.", labels=("shard", "version"))
    info.add_metric((*own, SOFTWARE), 1)
    yield info
    ready = report is not None and report.initialized
    yield gauge("ready", "Whether the shard has parameters.", ready)
    if report is None:
        return
    for name, (field, meaning) in _COUNTERS.items():
        counter = CounterMetricFamily(f"pserver_{name}", meaning, labels=labels)
        counter.add_metric(own, getattr(report.counters, field))
        yield counter
    yield histogram(
        "pserver_staleness_versions",
        "Updates of this shard between the parameters that a gradient came from and its own.",
        [(own, report.counters.staleness)],
        labels,
    )
    yield gauge("version", "Updates since the job began, as the parameters say.", report.version)
    yield gauge("generation", "Of the job.", report.generation)
    yield gauge("parameter_bytes", "Of parameters in float32.", report.nbytes)
    yield gauge("staged_pushes", "Sync: gradients that wait for their round.", report.staged_now)
    yield gauge("waiting", "Whether the shard waits for others.", bool(report.waiting_for))
    if tables:
        yield from _of_tables(own, tables)


def _of_tables(own: tuple[str, ...], tables: Sequence[TableFigures]) -> Iterator[Family]:
    for kinds, kind in ((_TABLE_GAUGES, GaugeMetricFamily), (_TABLE_COUNTERS, CounterMetricFamily)):
        for name, (field, meaning) in kinds.items():
            family = kind(f"pserver_table_{name}", meaning, labels=("shard", "table"))
            for table in tables:
                family.add_metric((*own, table.name), getattr(table, field))
            yield family
