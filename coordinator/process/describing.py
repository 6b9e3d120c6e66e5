"""Runs ``worker describe`` in a child process: user code never runs in the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.core.description import JobDescription
from coordinator.core.description_reader import parse_description, read_description
from coordinator.process.options import ServeOptions
from coordinator.records.run_directory import remembered
from psrpc.core.errors import InvalidJob, JobMismatch, PsError
from psrpc.core.text import sanitize_lines
from psrpc.files.description_file import MAX_NBYTES, DescriptionFile
from psrpc.files.storage import cause_of, read_bounded
from psrpc.ops.clock import MonotonicClock
from psrpc.ops.extras import check_tensorflow
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
from psrpc.options.job_keys import read_job_file

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
    """A child that has ended, and its output."""

    status: int
    out: bytes
    err: bytes


async def describe_job(
    command: Sequence[str], environment: Mapping[str, str], server: ForkClient | None = None
) -> JobDescription:
    """Runs the child and reads its output. Cancelling ends the child.

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
    return parse_description(ended.out.decode(errors="replace"))


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
    # The supervisor counts the CPU time of the coordinator's process group as the coordinator's
    # progress, and kills the group together with it.
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


def known(options: ServeOptions) -> JobDescription | None:
    """Returns the description in the file ``--description``, or else the one that the run directory
    stores of a start with the same arguments; None if the job must be described.

    Raises:
        InvalidJob: the file cannot be used, or was made with other settings than this start has.
        JobMismatch: it is of another job file or version.
    """
    if options.description is not None:
        return _given(options, options.description)
    if options.resume or options.run_dir is None:
        return None
    return remembered(
        options.run_dir, options.job, options.overrides, options.mode, options.replicas
    )


def _given(options: ServeOptions, path: Path) -> JobDescription:
    try:
        data = read_bounded(path, MAX_NBYTES)
    except (OSError, ValueError) as error:
        raise InvalidJob(
            f"--description {path} cannot be read: {cause_of(error)}; `worker describe "
            f"{options.job} -o {path}` writes it, or says why it cannot"
        ) from None
    file = DescriptionFile.parse(data, str(path))
    replicas = () if options.replicas is None else (f"replicas={options.replicas}",)
    here = ((*options.overrides, *replicas), options.mode)
    if (file.settings, file.mode) != here:
        raise InvalidJob(
            f"--description {path} was made with {_settings(file.settings, file.mode)}, and this "
            f"coordinator has {_settings(*here)}; say the same to both"
        )
    description = read_description(file.description)
    sha256 = hashlib.sha256(read_job_file(options.job)).hexdigest()
    if description.job_sha256 != sha256:
        raise JobMismatch(
            f"--description {path} is of a job file with SHA-256 {description.job_sha256[:12]}, "
            f"and {options.job} has {sha256[:12]}; write it anew with `worker describe "
            f"{options.job} -o {path}`",
            code="PS132",
        )
    return description


def _settings(settings: Sequence[str], mode: str | None) -> str:
    words = [f"--set {setting}" for setting in settings] + ([f"--mode {mode}"] if mode else [])
    return " ".join(words) or "no --set and no --mode"


async def describe_patiently(options: ServeOptions) -> JobDescription:
    """Describes the job of ``options``, and logs meanwhile that the coordinator waits for this.

    Raises:
        InvalidJob: TensorFlow is not installed, or the child's output is no description.
        DescribeFailed: the job is unusable.
    """
    check_tensorflow(
        "describing the job",
        f"`worker describe {options.job} -o job.json` where it is installed, and --description "
        "job.json here",
    )
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
    """Returns an announcer that logs the reason for which the coordinator waits."""
    return Announcer(
        lambda reason, waited_s: log.info("waiting", waiting_for=reason, waited_s=round(waited_s))
    )
