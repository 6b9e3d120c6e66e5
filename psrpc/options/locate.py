"""Finds the coordinator of a running job, for commands that talk to it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from psrpc.core.errors import CoordinatorUnreachable, PsError
from psrpc.core.names import ADDRESS, CERTS, JOB, PLAINTEXT, RUNS, SUMMARY
from psrpc.files.run_paths import (
    ending_in_words,
    is_starting,
    newest_run,
    read_ending,
    why_restarting,
    why_unreadable,
)
from psrpc.files.storage import read_bounded, unreadable
from psrpc.options.config_keys import check_key_names
from psrpc.options.declaration import run_path
from psrpc.options.security_options import add_security_arguments, from_arguments
from psrpc.security.identity import Role

if TYPE_CHECKING:
    from psrpc.security.credentials import Security

VARIABLE = "PSERVER_COORDINATOR"

LONGEST_ADDRESS = 1024

DEFAULT = f"${VARIABLE}, else as the newest run under {RUNS}/ says, else localhost:5000"
"""Describes where a coordinator is looked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options that choose a coordinator."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--coordinator",
        metavar="HOST[:PORT]",
        help=f"where it answers; default: {DEFAULT}",
    )
    where.add_argument("--run-dir", type=run_path, metavar="DIR", help="the one that runs on DIR")
    add_security_arguments(parser, listens=False)


def find_run(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the chosen run directory, by default the newest; None if the coordinator is chosen
    by its address.

    Raises:
        InvalidArgument: the environment has an unknown setting.
    """
    check_key_names(environment)
    if args.run_dir is not None or args.coordinator or environment.get(VARIABLE):
        given: Path | None = args.run_dir
        return given
    return newest_run()


def find_coordinator(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> str:
    """Returns ``HOST:PORT`` of the chosen coordinator.

    Raises:
        InvalidArgument: ``--coordinator`` is not an address; or as in :func:`find_run`.
        CoordinatorUnreachable: no coordinator runs on the run directory.
    """
    run_dir = find_run(args, environment)
    if run_dir is None:
        from psrpc.net.channel import COORDINATOR_PORT, format_address, parse_address

        address = args.coordinator or environment.get(VARIABLE) or f"localhost:{COORDINATOR_PORT}"
        return format_address(*parse_address(address, default_port=COORDINATOR_PORT))
    try:
        return read_bounded(run_dir / ADDRESS, LONGEST_ADDRESS).decode("ascii").strip()
    except FileNotFoundError:
        raise not_running(run_dir) from None
    except (OSError, ValueError) as error:
        why = unreadable(run_dir / ADDRESS, error)
        raise not_running(run_dir, PsError(why, code="PS406")) from None


def find_security(
    args: argparse.Namespace,
    role: Role = Role.OPERATOR,
    environment: Mapping[str, str] = os.environ,
) -> Security:
    """Finds the credentials for a coordinator: those that the options or the environment name, or
    else the certificates that the run made for itself.

    Raises:
        InvalidArgument: options contradict each other, or files cannot be used.
    """
    asked = from_arguments(role, args, environment)
    run_dir = find_run(args, environment)
    if asked.encrypted or asked.insecure or run_dir is None:
        return asked
    return security_of_run(run_dir, role)


def security_of_run(run_dir: Path, role: Role = Role.OPERATOR) -> Security:
    """Makes credentials from the certificates that a run made for itself; plaintext if it made
    none, or is served without them now.

    Raises:
        InvalidArgument: the certificates cannot be used.
    """
    from psrpc.security.credentials import Security

    certs = run_dir / CERTS
    used = certs.exists() and not (run_dir / PLAINTEXT).exists()
    return Security.from_options(role, certs if used else None)


def not_running(run_dir: Path, cause: PsError | None = None) -> CoordinatorUnreachable:
    """Returns the error for a ``run_dir`` without a running coordinator; it describes the state of
    the run.

    Args:
        cause: why the address of its last coordinator could not be read or reached.
    """
    ending = read_ending(run_dir)
    if ending:
        how = (
            f"the run has ended ({ending_in_words(ending)}); its figures are in "
            f"{run_dir / SUMMARY}, and `coordinator export` writes to files what it has trained"
        )
    elif is_starting(run_dir):
        why = why_restarting(run_dir)
        anew = f"the run was {why}, and its coordinator describes the job anew with that"
        reads = anew if why else "the run is being started, and its coordinator reads the job"
        how = f"{reads} first; ask again"
    elif damage := why_unreadable(run_dir):
        how = f"how the run has ended is not known, {damage}"
    elif not (run_dir / JOB).exists():
        how = (
            f"no run has begun there (it has no {JOB})"
            if run_dir.exists()
            else "there is no such directory"
        ) + "; say another --run-dir"
    else:
        how = (
            "the run has not ended, but its coordinator is gone, or is being started again; the "
            f"command that started the run goes on with it, with --run-dir {run_dir}"
        )
    return CoordinatorUnreachable(
        f"no coordinator runs on {run_dir}: {how}" + (f" ({cause})" if cause else ""),
        code=cause.code if cause else "",
    )
