"""``coordinator doctor``: diagnoses why a process cannot take part in a job, and advises."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from psrpc.core.errors import PsError
from psrpc.core.names import CERTS
from psrpc.options import locate as whereabouts
from psrpc.options.declaration import run_path
from psrpc.options.security_options import (
    add_security_arguments,
    certificates_directory,
    from_arguments,
    is_insecure,
    token_path,
    who_asks,
)
from psrpc.security.identity import Role

if TYPE_CHECKING:
    from psrpc.net.reach import Step
    from psrpc.security.credentials import Security

WIDTH = 13

ROLES = (Role.OPERATOR, Role.WORKER, Role.SHARD, Role.COORDINATOR, Role.READER)
"""Roles to call as, in order of preference among those with certificates: the widest rights come
first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator doctor``."""
    parser.description = (
        "Takes the way of a process to its coordinator, one step at a time: name, TCP, TLS, "
        "authorisation, version, job, disk, clock, routes of the workers. Stops at the first that "
        "fails, with what to do."
    )
    parser.add_argument(
        "coordinator",
        nargs="?",
        metavar="HOST:PORT",
        help="where the coordinator should answer; default: as RUN_DIR, or the newest run, says",
    )
    parser.add_argument(
        "--run-dir",
        type=run_path,
        metavar="RUN_DIR",
        help="where the job's run directory is on this machine; it is looked at, too",
    )
    add_security_arguments(parser, listens=False)


def run(args: argparse.Namespace) -> int:
    """Prints a line for each step; returns 0 if all pass, 1 otherwise.

    Raises:
        InvalidArgument: an invalid address.
        CoordinatorUnreachable: no address is given, and no coordinator runs on the run directory.
    """
    for step in examine(args):
        _say(step)
        if step.error is not None:
            return 1
    return 0


def examine(args: argparse.Namespace) -> Iterator[Step]:
    """Yields the steps, up to the first failure. Raises as :func:`run`."""
    from coordinator.doctor.checks import check_up
    from psrpc.net.channel import COORDINATOR_PORT, format_address, parse_address
    from psrpc.net.reach import Step

    if args.coordinator:
        address = format_address(*parse_address(args.coordinator, COORDINATOR_PORT))
    else:
        address = whereabouts.find_coordinator(args)
        args.run_dir = whereabouts.find_run(args)
    try:
        security = doctor_security(args)
        identity = security.identity
    except PsError as error:
        yield Step("certificates", error=error)
        return
    if identity is not None:
        yield Step("certificates", f"{security.directory}: {identity}")
    yield from check_up(address, security, args.run_dir)


def doctor_security(args: argparse.Namespace) -> Security:
    """Returns the credentials of the options and environment, otherwise those of the run. Raises
    InvalidArgument."""
    certs = certificates_directory(args)
    of_run = args.run_dir / CERTS if args.run_dir is not None else None
    if certs is None and of_run is not None and of_run.exists() and not is_insecure(args):
        certs = args.certs = of_run
    if certs is None or token_path(args) is not None:
        # A token grants all calls, whatever certificates exist beside it.
        return from_arguments(Role.OPERATOR, args)
    return from_arguments(who_asks(args, ROLES), args)


def _say(step: Step) -> None:
    good, bad = ("✓", "✗") if (sys.stdout.encoding or "").lower() == "utf-8" else ("ok", "NO")
    if step.error is None:
        print(f"{good} {step.name:{WIDTH}} {step.found}", flush=True)  # noqa: T201
    else:
        print(f"{bad} {step.name:{WIDTH}} {step.error.coded}", flush=True)  # noqa: T201
