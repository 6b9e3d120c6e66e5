"""Runs ``worker describe`` in a child process: user code never runs in the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator.core.description import JobDescription
from coordinator.core.description_reader import parse_description
from psrpc.core.errors import PsError
from psrpc.core.text import told_lines
from psrpc.ops.process import child_environment, module_command
from psrpc.options.config_keys import variable as variable_of

_NOT_FOR_JOBS = {variable_of(key) for key in ("certs", "token_file", "config")}
"""Variables that lead to keys."""

_SAID_CHARS = 64 << 10
"""Of what a child says that finds the job unusable."""


class DescribeFailed(PsError):
    """The child found the job unusable. The message is all that it said, its last line being the
    error, ready to be shown as it is."""


def describe_command(
    job: Path, mode: str | None, replicas: int | None, overrides: Sequence[str]
) -> list[str]:
    """The command line of the child. ``--replicas`` comes last, so it beats an override."""
    command = module_command("worker.cli", "describe", str(job))
    if mode is not None:
        command += ["--mode", mode]
    for override in overrides:
        command += ["--set", override]
    if replicas is not None:
        command += ["--set", f"replicas={replicas}"]
    return command


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what says where keys and secrets of this process are: the child runs
    the job's code, and has no use for them."""
    return {name: value for name, value in environment.items() if name not in _NOT_FOR_JOBS}


async def describe_job(command: Sequence[str], environment: dict[str, str]) -> JobDescription:
    """Runs the child and reads what it prints. Cancelling ends the child.

    Raises:
        DescribeFailed: the job cannot be used; holds the child's own words.
        InvalidJob: the child printed something else than a description.
    """
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=child_environment(without_keys(environment)),
    )
    try:
        out, err = await child.communicate()
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    if child.returncode:
        # The job's own code may have written there.
        said = told_lines(err.decode(errors="replace").strip(), _SAID_CHARS)
        how = f"`worker describe` ended with exit status {child.returncode}"
        raise DescribeFailed(said or f"error: {how} and no word; its log may say why")
    return parse_description(out.decode())
