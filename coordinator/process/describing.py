"""Runs ``worker describe`` in a child process: user code never runs in the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.core.description import JobDescription
from coordinator.core.description_reader import parse_description
from coordinator.process.options import ServeOptions
from psrpc.core.errors import PsError
from psrpc.core.text import sanitize_lines
from psrpc.ops.clock import MonotonicClock
from psrpc.ops.fork_server import (
    IMPORT_S,
    MESSAGE_BYTES,
    ForkClient,
    ForkFailed,
    ForkRequest,
    ForkServerLost,
    PendingFork,
    status_in,
)
from psrpc.ops.logs import get_logger
from psrpc.ops.process import child_environment, module_command
from psrpc.ops.retry import Announcer
from psrpc.options.config_keys import variable as variable_of

log = get_logger()

_NOT_FOR_JOBS = {variable_of(key) for key in ("certs", "token_file", "config")}
"""Environment variables that lead to keys."""

_SAID_CHARS = 64 << 10
"""Maximum of characters of the child's error output."""


class DescribeFailed(PsError):
    """The child found the job unusable. The message is its whole error output, whose last line is
    the error, ready to print."""


def describe_command(
    job: Path, mode: str | None, replicas: int | None, overrides: Sequence[str]
) -> list[str]:
    """Returns the child's command line. ``--replicas`` comes last, so it beats an override."""
    command = module_command("worker.cli", "describe", str(job))
    if mode is not None:
        command += ["--mode", mode]
    for override in overrides:
        command += ["--set", override]
    if replicas is not None:
        command += ["--set", f"replicas={replicas}"]
    return command


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the locations of this process's keys and secrets: the child
    runs the job's code and does not need them."""
    return {name: value for name, value in environment.items() if name not in _NOT_FOR_JOBS}


@dataclass(frozen=True)
class _Ended:
    """A child that has ended, and what it printed."""

    status: int
    out: bytes
    err: bytes


async def describe_job(
    command: Sequence[str], environment: Mapping[str, str], server: ForkClient | None = None
) -> JobDescription:
    """Runs the child and reads what it prints. Cancelling ends the child.

    Args:
        server: forks the child, if it can.

    Raises:
        DescribeFailed: the job is unusable; holds the child's error output.
        InvalidJob: the child printed something other than a description.
    """
    environment = child_environment(without_keys(environment))
    ended = None
    if server is not None:
        try:
            ended = await _run_forked(server, command, environment)
        except ForkFailed as error:
            log.warning("the job is described without warm start", reason=str(error))
    if ended is None:
        ended = await _run_fresh(command, environment)
    if ended.status:
        # The job's own code may have written to standard error, too.
        words = sanitize_lines(ended.err.decode(errors="replace").strip(), _SAID_CHARS)
        how = f"`worker describe` ended with exit status {ended.status}"
        raise DescribeFailed(words or f"error: {how} and no word; its log may say why")
    return parse_description(ended.out.decode())


async def _run_fresh(command: Sequence[str], environment: Mapping[str, str]) -> _Ended:
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        out, err = await child.communicate()
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    assert child.returncode is not None
    return _Ended(child.returncode, out, err)


async def _run_forked(
    server: ForkClient, command: Sequence[str], environment: Mapping[str, str]
) -> _Ended:
    """Runs the child as a fork. Raises ForkFailed: it has not run."""
    # The supervisor counts the CPU time of the coordinator's process group as its progress, and
    # ends the group with it.
    request = ForkRequest.of(command, environment, group=os.getpgrp(), attended=True)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with server.ask(request, out.fileno(), err.fileno()) as pending:
            try:
                first = await asyncio.wait_for(_message(pending), IMPORT_S)
            except TimeoutError:
                raise ForkServerLost(
                    f"the fork server did not import TensorFlow within {IMPORT_S:g} s"
                ) from None
            pid = pending.accept(first)
            handle = os.pidfd_open(pid)
            try:
                pending.go()
                status = status_in(await _message(pending))
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                raise
            finally:
                os.close(handle)
        out.seek(0)
        err.seek(0)
        return _Ended(status, out.read(), err.read())


async def _message(pending: PendingFork) -> bytes:
    try:
        return await asyncio.get_running_loop().sock_recv(pending.control, MESSAGE_BYTES)
    except ConnectionError:
        return b""


async def describe_patiently(options: ServeOptions) -> JobDescription:
    """Describes the job of ``options``, and logs that this takes its time."""
    command = describe_command(options.job, options.mode, options.replicas, options.overrides)
    server = ForkClient.inherited(os.environ)
    describing = asyncio.ensure_future(describe_job(command, dict(os.environ), server))
    clock = MonotonicClock()
    announcer = wait_announcer()
    try:
        while not (await asyncio.wait([describing], timeout=0.5))[0]:
            announcer.waiting(f"`worker describe {options.job}`", clock.now())
    except asyncio.CancelledError:
        describing.cancel()
        await asyncio.gather(describing, return_exceptions=True)
        raise
    return describing.result()


def wait_announcer() -> Announcer:
    """Makes the announcer of what the coordinator waits for."""
    return Announcer(
        lambda reason, waited_s: log.info("waiting", waiting_for=reason, waited_s=round(waited_s))
    )
