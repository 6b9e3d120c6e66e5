"""Where the coordinator of a running job answers, for the commands that talk to it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.run_directory import ADDRESS, CERTS, RUNS
from psrpc.errors import CoordinatorUnreachable, PsError
from psrpc.identity import Role
from psrpc.security_options import add_security_arguments, from_arguments

if TYPE_CHECKING:
    from coordinator.client import CoordinatorClient
    from psrpc.security import Security


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options that say which coordinator is meant."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where it answers; default: as the newest run under runs/ says, or localhost:5000",
    )
    where.add_argument("--run-dir", type=Path, metavar="DIR", help="the one that runs on DIR")
    add_security_arguments(parser, listens=False)


def find_coordinator(args: argparse.Namespace) -> str:
    """``HOST:PORT`` of the coordinator that is meant.

    Raises:
        InvalidArgument: ``--coordinator`` is no address.
        CoordinatorUnreachable: none runs on the run directory.
    """
    run_dir = _run_dir(args)
    if run_dir is None:
        from psrpc.channel import COORDINATOR_PORT, format_address, parse_address

        address = args.coordinator or f"localhost:{COORDINATOR_PORT}"
        return format_address(*parse_address(address, default_port=COORDINATOR_PORT))
    try:
        return str((run_dir / ADDRESS).read_text().strip())
    except OSError as error:
        from coordinator.summary import NAME as SUMMARY

        ended = (run_dir / SUMMARY).exists()
        raise CoordinatorUnreachable(
            f"no coordinator runs on {run_dir}: {error.strerror} ({ADDRESS})"
            + (f"; what its last run came to is in {run_dir / SUMMARY}" if ended else "")
        ) from None


def find_security(args: argparse.Namespace, role: Role = Role.OPERATOR) -> Security:
    """How to talk to that coordinator: as the options and the environment say, otherwise with the
    certificates that the run made for itself.

    Raises:
        InvalidArgument: options that contradict each other, or files that cannot be used.
    """
    asked = from_arguments(role, args)
    run_dir = _run_dir(args)
    if asked.encrypted or asked.insecure or run_dir is None:
        return asked
    return security_of_run(run_dir, role)


def security_of_run(run_dir: Path, role: Role = Role.OPERATOR) -> Security:
    """With the certificates that a run made for itself; plaintext if it made none.

    Raises:
        InvalidArgument: they cannot be used.
    """
    from psrpc.security import Security

    certs = run_dir / CERTS
    return Security.from_options(role, certs if certs.exists() else None)


def _run_dir(args: argparse.Namespace) -> Path | None:
    """The run that is meant, if it is one on this machine: where nothing is said, the newest that
    has a coordinator."""
    if args.run_dir is not None or args.coordinator:
        given: Path | None = args.run_dir
        return given
    running = sorted(RUNS.glob(f"*/{ADDRESS}"), key=lambda path: path.stat().st_mtime_ns)
    return running[-1].parent if running else None


def check_way(client: CoordinatorClient) -> None:
    """Looks whether somebody answers, which takes no time if so, and otherwise less than the
    deadline of a call.

    Raises:
        PsError: see :func:`nobody_answers`.
    """
    cause = client.why_unreachable()
    if cause is not None:
        raise nobody_answers(client, cause)


def nobody_answers(client: CoordinatorClient, cause: PsError | None = None) -> PsError:
    """The error where a call of ``client`` has found nobody, with what is in the way."""
    cause = cause or client.why_unreachable()
    if cause is not None and not cause.retryable:
        return cause
    return CoordinatorUnreachable(
        f"no coordinator answers at {client.address}; say which one is meant with --coordinator "
        "HOST:PORT or --run-dir DIR" + (f": {cause}" if cause else ""),
        code=cause.code if cause else "",
    )
