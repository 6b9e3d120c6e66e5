"""The process of a shard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from coordinator.client.client import CoordinatorClient
from pserver.core.counters import ShardReport
from pserver.core.fence import ShardIdentity
from pserver.engine.engine import ShardEngine
from pserver.process.config import ServeConfig, advertised_address
from pserver.process.coordination import Coordination
from pserver.process.ending import Ending
from pserver.server.server import ShardServer
from pserver.snapshots.writer import SnapshotFiles, SnapshotWriter
from pserver.tables.tables import TableFigures
from pserver.updates.factory import make_engine
from psrpc import SOFTWARE
from psrpc.core.encoding import wire_encoding
from psrpc.core.errors import InvalidJob, PsError
from psrpc.core.names import TOKEN
from psrpc.core.plan import Plan
from psrpc.files.run_paths import LONGEST_TOKEN
from psrpc.files.storage import cause_of, read_bounded
from psrpc.metrics.exporter import Family, MetricsServer, histogram
from psrpc.ops.logs import get_logger
from psrpc.ops.process import incarnation
from psrpc.options.settings import OFF

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


log = get_logger()

GRACE_S = 2.0
"""How long calls in flight may still take when the shard stops."""

FLUSH_S = 0.5
"""How long a snapshot that is just being written may still take when the shard stops."""


def serve(
    config: ServeConfig,
    ending: Ending,
    worker: int = 0,
    opened: Callable[[ShardEngine], object] = lambda _engine: None,
) -> None:
    """Serves shard ``config.shard`` until ``ending`` ends, by a signal or otherwise.

    Args:
        worker: the incarnation of the worker that hosts the shard; 0 for a process of its own.
        opened: gets the engine before it answers the first call.

    Raises:
        PsError: the shard could not start, or had to stop; says why.
    """
    own = incarnation()
    server = ShardServer(
        config.shard,
        config.bind,
        security=config.security,
        reflection=config.reflection,
        data_port=None if config.data_connections == OFF else int(config.data_connections),
    )
    with (
        server,
        MetricsServer(
            config.metrics, lambda: _metrics(config.shard, server.engine), config.security
        ) as metrics,
        Coordination(
            CoordinatorClient(config.coordinator, config.security),
            config.shard,
            own,
            config.connect_timeout_s,
            ending,
            worker=worker,
        ) as coordination,
    ):
        log.info(
            "listening",
            port=server.port,
            data_port=server.data_port,
            coordinator=config.coordinator,
            metrics=metrics.address,
        )
        job = coordination.register(
            lambda: advertised_address(
                config.bind, server.port, config.advertise, config.coordinator
            )
        )
        log.info("registered, builds its update engine", engine=job.engine)
        run_dir = config.run_dir or Path(job.run_dir)
        check_token(run_dir, Path(job.run_dir), job.token)
        config.security.revocations.share(run_dir)
        plan = Plan.from_json(job.plan)
        identity = ShardIdentity(shard=config.shard, incarnation=own, generation=0, policy=0)
        files = SnapshotFiles(identity, plan, job.run_id, run_dir)
        writer = SnapshotWriter(files, coordination.report_snapshot)
        try:
            updates = make_engine(
                cast("Literal['keras', 'numpy']", job.engine),
                json.loads(job.optimizer),
                plan,
                config.shard,
                wire_encoding(job.wire_dtype),
                hosted=worker != 0,
            )
        except PsError as error:
            # A restarted shard would fail in the same way, so the job must not wait for one.
            coordination.cannot_serve(error)
            raise
        engine = ShardEngine(identity, plan, updates, writer, first_rows=job.first_rows)
        writer.start()
        opened(engine)
        try:
            coordination.follow(engine, files.read, lambda: server.open(engine))
            ending.save_first(coordination.leave)
            ending.wait()
            log.info("leaving")
        finally:
            server.stop(GRACE_S)
            writer.stop(FLUSH_S)
    if ending.error is not None:
        raise ending.error


def _metrics(shard: int, engine: ShardEngine | None) -> Iterator[Family]:
    if engine is None:
        return families(shard, None, ())
    return families(shard, engine.report(), engine.table_figures())


def check_token(run_dir: Path, coordinators: Path, token: str) -> None:
    """Checks by the token in ``run_dir`` that it is the coordinator's run directory.

    Raises:
        InvalidJob: it is not; names both paths.
    """
    path = run_dir / TOKEN
    try:
        found = read_bounded(path, LONGEST_TOKEN).decode("ascii").strip()
        why = "holds another token"
    except (OSError, ValueError) as error:
        found, why = None, f"cannot be read ({cause_of(error)})"
    if found != token:
        raise InvalidJob(
            f"{path} {why}: this shard does not share the coordinator's run directory"
            f" {coordinators}; mount it here, and say --run-dir where its path differs",
            code="PS505",
        )
