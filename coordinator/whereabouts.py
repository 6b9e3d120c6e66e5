"""Where the coordinator of a running job answers, for the commands that talk to it."""

from __future__ import annotations

import argparse
from pathlib import Path

from coordinator.run_directory import ADDRESS
from psrpc.errors import CoordinatorUnreachable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options that say which coordinator is meant."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where it answers; default: localhost:5000",
    )
    where.add_argument("--run-dir", type=Path, metavar="DIR", help="the one that runs on DIR")


def find_coordinator(args: argparse.Namespace) -> str:
    """``HOST:PORT`` of the coordinator that is meant.

    Raises:
        InvalidArgument: ``--coordinator`` is no address.
        CoordinatorUnreachable: none runs on the run directory.
    """
    if args.run_dir is None:
        from psrpc.channel import COORDINATOR_PORT, format_address, parse_address

        address = args.coordinator or f"localhost:{COORDINATOR_PORT}"
        return format_address(*parse_address(address, default_port=COORDINATOR_PORT))
    try:
        return str((args.run_dir / ADDRESS).read_text().strip())
    except OSError as error:
        from coordinator.summary import NAME as SUMMARY

        ended = (args.run_dir / SUMMARY).exists()
        raise CoordinatorUnreachable(
            f"no coordinator runs on {args.run_dir}: {error.strerror} ({ADDRESS})"
            + (f"; what its last run came to is in {args.run_dir / SUMMARY}" if ended else "")
        ) from None


def nobody_at(address: str) -> CoordinatorUnreachable:
    """The error where nobody answers at ``address``."""
    return CoordinatorUnreachable(
        f"no coordinator answers at {address}; say which one is meant with --coordinator "
        "HOST:PORT or --run-dir DIR"
    )
