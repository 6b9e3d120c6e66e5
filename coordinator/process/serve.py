"""``coordinator serve``: runs one job from its description to its summary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from coordinator.certificates.audit import AUDIT, AuditLog
from coordinator.checkpoints.disk import ThreadedDisk
from coordinator.core.description import JobDescription
from coordinator.core.lifecycle import ENDED, STOPPED
from coordinator.core.wording import in_words
from coordinator.dashboard.server import DashboardServer
from coordinator.dashboard.site import job_site
from coordinator.dashboard.snapshots import DashboardSampler, DashboardSnapshots
from coordinator.job.engine import Engine
from coordinator.job.job_run import JobRun
from coordinator.process.changed_settings import describe_changed, with_kept
from coordinator.process.describing import describe_patiently, known, wait_announcer
from coordinator.process.disk_errors import disk_errors_named, hold_directory
from coordinator.process.metrics import families
from coordinator.process.options import ServeOptions
from coordinator.process.resume_checks import check_ledger
from coordinator.process.settling import settings_said, settle, warn_of_key
from coordinator.process.signals import JobSignals
from coordinator.process.summary import summarize, write_final_summary
from coordinator.records.run_directory import (
    LEDGER,
    RunDirectory,
    check_free,
    check_holds_run,
    new_run_directory,
    newest_run_directory,
)
from coordinator.records.store import Store
from coordinator.rpc.server import Server
from psrpc.core.errors import InvalidSetting, JobDone, JobFailed, PsError
from psrpc.core.names import HISTORY
from psrpc.files.run_paths import newest_run, unfinished_run
from psrpc.metrics.exporter import Family, MetricsServer
from psrpc.net.channel import check_metrics_address, format_address, parse_address
from psrpc.ops.clock import Clock, MonotonicClock
from psrpc.ops.exit_status import DONE, DRAINED, FAILED, INTERRUPTED, RESTARTS
from psrpc.ops.logs import get_logger
from psrpc.options.settings import OFF
from psrpc.v1 import coordinator_pb2 as pb

log = get_logger()

LEAVE_S = 10.0
"""Most seconds that the coordinator stays to tell shards and workers that the job is over."""

TICK_S = 0.5

METRICS_S = 5.0
"""Deadline of a metrics request that waits for the job loop."""

TELL_S = 1.0
"""Most seconds that a drained coordinator stays for leaving shards, which ask every 0.2 s; and how
long one stays whose cluster is to start again, to say so."""

REFUSE_S = 15.0
"""Seconds for which a supervised coordinator that has no run stays and reports why: the processes
that the supervisor started with it take seconds to come up."""


async def serve(options: ServeOptions, check: Callable[[], object] = lambda: None) -> int:
    """Runs the job to its end or until a signal; returns an exit status.

    Args:
        check: raises a PsError that rules the job out; called once the server has its port.

    Raises:
        JobFailed: the job could not go on. The summary is written unless the disk refused it.
        PsError: the job or the options are unusable; nothing was started.
    """
    signals = JobSignals()
    signals.install()
    host, port = parse_address(options.bind, default_port=5000)
    server = Server(format_address(host, port), options.security, options.reflection)
    board = DashboardSnapshots(options.job.stem, time.time)
    chronicle = DashboardSampler(board)
    dashboard = DashboardServer(options.dashboard, job_site(board), options.security.insecure)
    try:
        # Before the run directory exists.
        if options.metrics != OFF:
            check_metrics_address(options.metrics, options.security)
        port = server.bind()
        dashboard.start()
        if dashboard.url:
            log.info("dashboard", url=dashboard.url)
        if options.description is None:
            # Otherwise the job's data need not be on this machine.
            check()
        if options.run_dir is not None:
            if options.resume:
                check_holds_run(options.run_dir)
            if not options.auto_resume:
                # With auto_resume, an earlier coordinator may take until the job is described to
                # leave.
                check_free(options.run_dir)
            check_ledger(options.run_dir, resume=options.resume or options.auto_resume)
        options, kept = with_kept(options, settings_said(options))
        if kept.pending:
            server.preparing = f"describing the job anew with {in_words(kept.settings)}"
        description = known(options) or await signals.unless_stopped(describe_patiently(options))
        if description is None:
            return signals.status
        check_attended(options, description)
        plan = kept.plan(options, description)
        with (
            disk_errors_named(plan),
            hold_directory(
                RunDirectory(_run_dir(options, description), options.resume), options
            ) as directory,
            Store(directory.path / LEDGER) as store,
            AuditLog(directory.path / AUDIT, lambda: datetime.now(UTC)) as audit,
        ):
            store.check()
            run = settle(options, description, plan, directory, store, kept=kept)
            disk = ThreadedDisk(run, failed=lambda why: job_run.fail(why))
            job_run = JobRun(
                run,
                store,
                MonotonicClock(),
                disk,
                at_end=lambda: write_final_summary(job_run),
                history=run.run_dir / HISTORY,
                attended=options.attended,
            )
            warn_of_key(job_run, options.security)
            signals.pass_on_to(job_run)
            describe = partial(describe_changed, options) if options.starts_again else None
            engine = Engine(job_run, store, describe=describe)
            loop = asyncio.get_running_loop()

            def revoked(serials: list[str]) -> None:
                audit.note("revoked", serials=serials)
                loop.call_soon_threadsafe(engine.sessions.certificates_revoked, serials)

            options.security.revocations.on_revoked = revoked
            options.security.revocations.share(run.run_dir, keeps=True)
            await server.start(engine, board, audit)
            where = "127.0.0.1" if host in ("0.0.0.0", "::") else host
            directory.write_address(
                format_address(where, port), encrypted=options.security.encrypted
            )
            chronicle.open(run.run_id, run.run_dir, server.status)
            try:
                with MetricsServer(
                    options.metrics, lambda: _metrics(server, loop), options.security
                ) as metrics:
                    log.info(
                        "serving",
                        address=format_address(host, port),
                        run_dir=str(run.run_dir),
                        metrics=metrics.address,
                    )
                    await _until_over(job_run, chronicle)
                await disk.close()
            finally:
                await chronicle.close()
                # A late call would find the job run and its store closed. So would disk work that
                # late calls began, such as a commit when the job is left at once.
                await server.stop()
                await disk.close()
                job_run.close()
            # After the last reports of all processes.
            status = _exit_status(job_run)
            if status == DRAINED:
                log.info("drained", checkpoint=job_run.checkpoints.newest or None)
                return status
            write_final_summary(job_run)
            log.info("over", phase=job_run.phase, resume=summarize(job_run)["resume"] or None)
            if job_run.phase == "failed" and status != INTERRUPTED:
                raise JobFailed(job_run.reason)
            return status
    except PsError as error:
        if isinstance(error, JobDone):
            log.info("nothing is left to do", why=str(error))
        if options.auto_resume and server.closed and not isinstance(error, JobFailed):
            await _tell(server, error, signals)
        if isinstance(error, JobDone):
            return DONE
        raise
    finally:
        await server.stop()
        await asyncio.to_thread(dashboard.stop)


def _metrics(server: Server, loop: asyncio.AbstractEventLoop) -> Iterator[Family]:
    """Returns the metrics; called on another thread, reads the status on the job loop."""
    status: Future[pb.GetJobStatusResponse] = Future()

    def read() -> None:
        try:
            status.set_result(server.status())
        except Exception as error:
            status.set_exception(error)

    loop.call_soon_threadsafe(read)
    return families(status.result(METRICS_S))


def check_attended(options: ServeOptions, description: JobDescription) -> None:
    """Raises InvalidSetting for an attended job that sets its learning rate itself."""
    if options.attended and description.reduce_lr is not None:
        raise InvalidSetting(
            "the job has reduce_lr, and --attended leaves the learning rate to the attendant; say "
            "--set reduce_lr=none, or leave out --attended"
        )


def _run_dir(options: ServeOptions, description: JobDescription) -> Path:
    if options.run_dir is not None:
        return options.run_dir
    if options.resume:
        return newest_run_directory(description.name)
    if options.auto_resume:
        newest = newest_run(description.name)
        return newest or new_run_directory(description.name, datetime.now(UTC))
    if earlier := unfinished_run(description.name):
        log.warning("an earlier run has not ended", to_go_on_with_it=f"--run-dir {earlier}")
    return new_run_directory(description.name, datetime.now(UTC))


async def _until_over(job_run: JobRun, chronicle: DashboardSampler) -> None:
    """Ticks until the job is over and all processes know it, or :data:`LEAVE_S` have passed."""
    ticking = asyncio.create_task(_tick_forever(job_run, chronicle))
    over = asyncio.create_task(_wait_until_over(job_run))
    try:
        await asyncio.wait((ticking, over), return_when=asyncio.FIRST_COMPLETED)
        for task in (ticking, over):
            if task.done():
                task.result()
    finally:
        for task in (ticking, over):
            task.cancel()
        await asyncio.gather(ticking, over, return_exceptions=True)


async def _tick_forever(job_run: JobRun, chronicle: DashboardSampler) -> None:
    while True:
        job_run.tick()
        chronicle.tick()
        await asyncio.sleep(TICK_S)


async def _wait_until_over(job_run: JobRun) -> None:
    loop = asyncio.get_running_loop()
    while not (job_run.phase in ENDED or job_run.drained):
        await job_run.bell.wait(loop.time() + LEAVE_S)
    if job_run.drained:
        deadline = loop.time() + TELL_S
        while not job_run.departures.all_told and await job_run.bell.wait(deadline):
            pass
        return
    if job_run.phase == "restarting":
        # `coordinator set` asks every 0.2 s.
        await asyncio.sleep(TELL_S)
    deadline = loop.time() + LEAVE_S
    while not job_run.everyone_knows:
        # A tick detects members that are gone, and rings the bell.
        if not await job_run.bell.wait(deadline):
            return


def _exit_status(job_run: JobRun) -> int:
    if job_run.phase == "failed":
        return INTERRUPTED if job_run.reason == STOPPED else FAILED
    return {"done": DONE, "restarting": RESTARTS}.get(job_run.phase, DRAINED)


async def _tell(server: Server, why: PsError, signals: JobSignals) -> None:
    """Reports for a while why there is no run; a signal ends that."""
    server.refuse(why)
    await signals.unless_stopped(stay_to_tell(why, MonotonicClock()))


async def stay_to_tell(
    why: PsError, clock: Clock, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Keeps answering shards and workers that were started together with this coordinator. Logs
    this at once, after three seconds, and each time the wait has doubled."""
    what = "that the run is done" if isinstance(why, JobDone) else "why there is no run"
    awaited = f"shards and workers that ask, to tell them {what} (for {REFUSE_S:.0f} s)"
    log.info("waiting", waiting_for=awaited, why=why.coded)
    announcer, until = wait_announcer(), clock.now() + REFUSE_S
    while (left := until - clock.now()) > 0:
        announcer.waiting(awaited, clock.now())
        await pause(min(left, TICK_S))
