"""Runs the worker process, from its options to its exit status."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from coordinator.client.client import CoordinatorClient
from pserver.client.client import ShardClient
from psrpc import SOFTWARE
from psrpc.core.errors import (
    AccessDenied,
    InvalidArgument,
    InvalidJob,
    JobDone,
    JobFailed,
    JobMismatch,
    PsError,
    disk_code,
    disk_reason,
    error_line,
)
from psrpc.metrics.exporter import Family, MetricsServer
from psrpc.ops.exit_status import BAD_INPUT, DONE, FAILED, after_signal
from psrpc.ops.logs import get_logger
from psrpc.ops.process import incarnation, on_stop_signals
from psrpc.ops.tracing import tracing
from psrpc.options.job_keys import UserCodeFailed
from psrpc.options.job_source import first_look
from psrpc.options.settings import OFF, WorkerOptions
from psrpc.security.credentials import PLAINTEXT, Security
from worker.job.loader import LoadedJob, only_while_loading
from worker.loop.session import WorkerSession
from worker.loop.step_times import StepTimes
from worker.process.hosting import SliceHosting
from worker.process.job_copy import check_job_copy, load_copy
from worker.protocol.done import Stopped
from worker.protocol.membership import WorkerMembership
from worker.runtime.quiet import import_tensorflow

if TYPE_CHECKING:
    from worker.runtime.devices import Device

log = get_logger()

CAUSES = ("data", "compute", "barrier", "network", "apply")
"""The causes that a worker's time counts towards, see ``WorkerTimes``."""

LEAVE_S = 6.0
"""Seconds that a worker waits for its step after a stop signal. Including the farewell, it leaves
within 10 s of the signal."""

HOST_LEAVE_S = 1.0
"""The same for a worker whose slices have ended, with which its step is of no use."""


@dataclass(frozen=True)
class WorkerConfig(WorkerOptions):
    """The options of ``worker run``, with the worker's credentials. ``coordinator`` is HOST:PORT;
    ``metrics`` is the HOST:PORT for Prometheus, or "off", the default here."""

    metrics: str = field(default=OFF, kw_only=True)
    security: Security = field(default=PLAINTEXT, kw_only=True)


@only_while_loading()
def run_worker(options: WorkerConfig) -> int:
    """Takes part in a job until it ends; returns the exit status. Only for the main thread.

    Raises:
        InvalidArgument: an address or an endpoint is invalid.
        PortInUse: the port for metrics is taken.
    """
    times = StepTimes()
    options.security.announce()
    try:
        # Find out at once, not only at the end, if the file cannot be written.
        if options.step_times is not None:
            times.write(options.step_times)
    except OSError as error:
        cause = f"--step-times {options.step_times}: {disk_reason(error)}"
        return _end(error_line(PsError(cause, code=disk_code(error))), BAD_INPUT)
    own = incarnation()
    with (
        CoordinatorClient(options.coordinator, options.security) as client,
        WorkerSession(client, own, options.connect_timeout_s, times.totals) as standing,
        MetricsServer(
            options.metrics,
            lambda: families(standing.membership, standing.waits.reason(), times),
            options.security,
        ) as metrics,
        tracing(options.trace, "worker"),
        SliceHosting(standing, options, own) as hosting,
    ):
        if metrics.address != OFF:
            log.info("metrics", address=metrics.address)
        on_stop_signals(
            lambda number: _stop(after_signal(number), options, standing, times, hosting)
        )
        try:
            # Report errors that waiting cannot fix before TensorFlow takes seconds to load. The
            # coordinator may start during that time even if --connect-timeout is shorter, since
            # that counts from the next request: a cluster started all at once would otherwise wait
            # for one process after the other.
            if options.job is not None:
                first_look(Path(options.job))
            away = _why_away(client)
            if away is None:
                check_job_copy(options, standing.get_job())
            else:
                log.info(f"no answer yet from the coordinator at {client.address}: {away.coded}")
            log.info("loading TensorFlow, then asking the coordinator")
            import_tensorflow()
            _train(options, standing, times, hosting)
        except Stopped as stopped:
            log.info("leaving", why=str(stopped))
            return stopped.status
        except JobDone as error:
            log.info("nothing is left to do", why=str(error))
            return DONE
        except JobFailed as error:
            return _end(error_line(error, "job failed: "), FAILED)
        except PsError as error:
            if isinstance(error, UserCodeFailed):
                sys.stderr.write(error.user_traceback)
            # If the worker was in the job before, the job has changed: no bad input, unless PS506.
            wrong = isinstance(error, InvalidJob | InvalidArgument | JobMismatch)
            bad = isinstance(error, AccessDenied) or error.code == "PS506"
            bad = bad or (wrong and not standing.membership.worker)
            return _end(error_line(error), BAD_INPUT if bad else FAILED)
        finally:
            _keep(times, options)
    raise AssertionError("a trainer ends by raising")


def families(membership: WorkerMembership, waiting_for: str, times: StepTimes) -> Iterator[Family]:
    """Yields the Prometheus metrics of a worker, ``worker_*``; ``waiting_for`` is empty while it
    works."""
    info = GaugeMetricFamily(
        "worker_info", "Always 1; the name is the coordinator's.", labels=("worker", "version")
    )
    info.add_metric((membership.worker, SOFTWARE), 1)
    yield info
    yield CounterMetricFamily("worker_steps", "Finished steps.", value=times.steps)
    seconds = CounterMetricFamily(
        "worker_seconds", "Time in and between steps, by cause.", labels=("cause",)
    )
    totals = times.totals()
    for cause in CAUSES:
        seconds.add_metric((cause,), getattr(totals, cause))
    yield seconds
    generation = membership.generation
    yield GaugeMetricFamily("worker_generation", "The generation of the job.", value=generation)
    waits = bool(waiting_for)
    yield GaugeMetricFamily("worker_waiting", "Whether it waits for a peer.", value=waits)


def _why_away(client: CoordinatorClient) -> PsError | None:
    """Asks the coordinator once; returns the retryable error if it does not answer. Raises PsError
    for an error that waiting cannot fix; see :meth:`CoordinatorClient.raise_if_hopeless`."""
    away = client.raise_if_hopeless()
    if away is None:
        try:
            client.get_job()
        except PsError as error:
            if not error.retryable:
                raise
            return error
    return away


def _train(
    options: WorkerConfig, standing: WorkerSession, times: StepTimes, hosting: SliceHosting
) -> None:
    from worker.model.placement import check_enough
    from worker.runtime.devices import configure_devices

    asked = standing.get_job()
    # Before the job file runs: once it has used TensorFlow (for an optimizer, say), neither
    # devices nor threads can be chosen.
    device = configure_devices(
        options.gpu,
        cpus=int(options.devices.removeprefix("cpu:")) if options.devices else 1,
        memory_fraction=options.gpu_memory_fraction,
        intra_op_threads=options.intra_op_threads or asked.intra_op_threads or None,
    )
    loaded = load_copy(options, asked)
    if not loaded.job.soft_placement:
        check_enough(loaded.job.devices, device)
    if options.slow_down > 1:
        log.warning("this worker is slowed down on purpose", times=options.slow_down)
    connect: Callable[..., ShardClient] = ShardClient
    if loaded.job.dense == "allreduce":
        hosting.offer()
        connect = hosting.connect
    shm, slow_down = options.shm, options.slow_down
    train(loaded, device, standing, times, shm=shm, slow_down=slow_down, connect=connect)


def train(
    loaded: LoadedJob,
    device: Device,
    standing: WorkerSession,
    times: StepTimes | None = None,
    *,
    shm: bool = True,
    slow_down: float = 1.0,
    connect: Callable[..., ShardClient] = ShardClient,
) -> None:
    """Works until the job ends, leaves it, and raises; for the arguments and the errors see
    :class:`worker.loop.performer.Performer` and :func:`worker.protocol.conduct.conduct`."""
    from worker.lanes.lane_source import make_source
    from worker.loop.performer import Performer

    job, waits = loaded.job, standing.waits
    with (
        make_source(job, device, waits, loaded.optimizer_arguments) as source,
        Performer(
            source,
            standing,
            loaded.sha256,
            device.label,
            times,
            shm=shm,
            slow_down=slow_down,
            prefetch_rows=job.prefetch_rows,
            connect=connect,
        ) as performer,
    ):
        performer.run()


def _stop(
    status: int,
    options: WorkerConfig,
    standing: WorkerSession,
    times: StepTimes,
    hosting: SliceHosting,
) -> None:
    """Leaves after the current step, or in the middle of it if it takes too long. Works on until
    the slices that it hosts are saved, since that may need the end of the present round."""
    leave_s = LEAVE_S if hosting.leave() == 0 else HOST_LEAVE_S
    standing.stop(status)
    timer = threading.Timer(leave_s, _leave_now, [options, standing, times])
    timer.daemon = True
    timer.start()


def _leave_now(options: WorkerConfig, standing: WorkerSession, times: StepTimes) -> None:
    standing.leave("told to stop")
    _keep(times, options)
    # The main thread may be inside a step or a data source, which cannot be interrupted.
    os._exit(standing.membership.leaves_with)


def _keep(times: StepTimes, options: WorkerConfig) -> None:
    try:
        if options.step_times is not None:
            times.write(options.step_times)
    except OSError as error:
        log.warning("the step times are lost", reason=str(error))


def _end(line: str, status: int) -> int:
    sys.stderr.write(line + "\n")
    return status
