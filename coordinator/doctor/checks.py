"""Checks the path from this process to a coordinator, one step at a time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from coordinator.checkpoints.checkpoints import RESERVE_NBYTES
from coordinator.client.client import CALL_S, CoordinatorClient
from coordinator.core.wording import whence
from coordinator.records.run_directory import LEDGER
from psrpc import SOFTWARE
from psrpc.core.errors import (
    CoordinatorUnreachable,
    InvalidArgument,
    InvalidJob,
    JobFailed,
    JobMismatch,
    Preparing,
    PsError,
    ResourceExhausted,
    ShardUnreachable,
    disk_code,
    disk_reason,
)
from psrpc.core.text import counted
from psrpc.net.health import why_unhealthy
from psrpc.net.reach import Step, reach
from psrpc.security.credentials import Security
from psrpc.security.identity import Role
from psrpc.v1 import coordinator_pb2 as pb

MOST_APART_S = 30.0
"""Largest accepted difference of two clocks, in seconds: certificates are valid from an hour before
their making, and people read logs of several machines side by side."""


def check_up(address: str, security: Security, run_dir: Path | None) -> Iterator[Step]:
    """Yields the steps of the path to the coordinator at ``address``, and of the checks of the job
    there, up to the first failure. Changes nothing.

    Args:
        security: the credentials of an operator or, without them, of another role, which sees less.
        run_dir: the job's run directory on this machine; None skips its check.
    """
    failed = False
    for step in reach(address, security, Role.COORDINATOR):
        failed = step.error is not None
        yield step
    if failed:
        return
    try:
        client = CoordinatorClient(address, security)
    except InvalidArgument as error:
        # Plaintext to another machine without --insecure.
        yield Step("TLS", error=error)
        return
    with client:
        for step in _ask(client):
            yield step
            if step.error is not None:
                return
    if run_dir is not None:
        yield _run_directory(run_dir)


def _ask(client: CoordinatorClient) -> Iterator[Step]:
    role = client.security.role
    if role == Role.WORKER:
        return _as_worker(client)
    if role is not None and role.serves:
        return _as_other(client)
    return _as_viewer(client)


def _as_other(client: CoordinatorClient) -> Iterator[Step]:
    """Checks health alone: a shard's calls change state, and a coordinator has no calls."""
    reason = why_unhealthy(client.address, "", CALL_S, client.security)
    if reason:
        yield Step("authorisation", error=CoordinatorUnreachable(reason))
        return
    yield Step("authorisation", f"{client.security.identity or 'a server'} is let in")
    yield Step("job", "the coordinator serves it; more is for an operator to see")


def _as_worker(client: CoordinatorClient) -> Iterator[Step]:
    try:
        job = client.get_job()
    except Preparing as error:
        yield Step("job", str(error))
        return
    except PsError as error:
        yield Step("authorisation", error=error)
        return
    yield Step("authorisation", f"{client.security.identity or 'a worker'} may ask for the job")
    yield _version(job.software)
    yield Step("job", f"{job.job_path}, mode {job.mode}; more is for an operator to see")


def _as_viewer(client: CoordinatorClient) -> Iterator[Step]:
    """Checks the job's status, which operators and readers may read."""
    began = time.time()
    try:
        status = client.get_job_status()
    except Preparing as error:
        yield Step("job", str(error))
        return
    except PsError as error:
        yield Step("authorisation", error=error)
        return
    there = (began + time.time()) / 2
    who = "by token" if client.security.by_token else client.security.identity or "plaintext"
    may = "see" if client.security.role == Role.READER else "see and change"
    yield Step("authorisation", f"{who}: may {may} the job")
    yield _version(status.software)
    yield _job(status)
    yield _free(status)
    yield _clock(status.clock_s - there)
    yield _routes(status)


def _version(software: str) -> Step:
    if software != SOFTWARE:
        return Step(
            "version",
            error=JobMismatch(
                f"the coordinator runs version {software or '(unknown)'} of this software, this is "
                f"{SOFTWARE}; install the same version everywhere",
                code="PS131",
            ),
        )
    return Step("version", SOFTWARE)


def _job(status: pb.GetJobStatusResponse) -> Step:
    if status.phase == "failed":
        return Step("job", error=JobFailed(status.reason or "it does not say why"))
    where = whence(status) or f"step {status.global_step}/{status.total_steps}"
    parts = [f"{status.job} is {status.phase}, {where}"]
    if status.waiting_for:
        parts.append(f"waiting for {status.waiting_for} (for {status.waited_s:.0f} s)")
    if status.insecure:
        parts.append("INSECURE: plaintext on the network")
    return Step("job", "; ".join(parts))


def _free(status: pb.GetJobStatusResponse) -> Step:
    """Checks that the coordinator's run directory has room for a checkpoint. That needs at least
    the size of the parameters; optimizers add up to twice as much."""
    needed = sum(shard.nbytes for shard in status.shards) + RESERVE_NBYTES
    free = status.free_nbytes
    if free < 0:
        return Step("disk", f"{status.run_dir}: the coordinator's disk does not say what is free")
    if free < needed:
        error = ResourceExhausted(
            f"{free / 1e6:.1f} MB are free in {status.run_dir} at the coordinator, and a "
            f"checkpoint takes at least {needed / 1e6:.1f} MB; make room, or keep fewer "
            "(`coordinator checkpoint prune`)",
            code="PS502",
        )
        return Step("disk", error=error)
    return Step("disk", f"{free / 1e9:.1f} GB free in {status.run_dir} at the coordinator")


def _clock(ahead_s: float) -> Step:
    if abs(ahead_s) <= MOST_APART_S:
        return Step("clock", f"the coordinator's differs by {abs(ahead_s):.1f} s")
    how = "ahead of" if ahead_s > 0 else "behind"
    error = InvalidArgument(
        f"the coordinator's clock is {abs(ahead_s):.0f} s {how} this machine's; set both by NTP: "
        "certificates are valid from and until a moment",
        code="PS507",
    )
    return Step("clock", error=error)


def _routes(status: pb.GetJobStatusResponse) -> Step:
    """Checks that workers reach shards and make progress."""
    if status.stuck:
        return Step("routes", error=ShardUnreachable("; ".join(status.stuck), code="PS214"))
    active = sum(worker.state == "active" for worker in status.workers)
    return Step("routes", f"none is known to be broken, of {counted(active, 'worker')}")


def _run_directory(run_dir: Path) -> Step:
    name = "run-dir"
    if not (run_dir / LEDGER).exists():
        error: PsError = InvalidJob(
            f"{run_dir} holds no run (it has no {LEDGER}); mount the coordinator's run directory "
            "here, and say its path with --run-dir",
            code="PS125",
        )
        return Step(name, error=error)
    try:
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as failed:
        error = InvalidJob(
            f"cannot write to {run_dir}, where shards keep their snapshots: {disk_reason(failed)}",
            code=disk_code(failed),
        )
        return Step(name, error=error)
    return Step(name, f"{run_dir} can be written")
