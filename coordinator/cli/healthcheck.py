"""The command line of ``coordinator healthcheck``."""

from __future__ import annotations

import argparse

from psrpc.core.errors import CoordinatorUnreachable
from psrpc.options import healthcheck
from psrpc.options import locate as whereabouts
from psrpc.options.declaration import run_path
from psrpc.options.security_options import who_asks
from psrpc.security.identity import Role


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator healthcheck``."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "coordinator",
        nargs="?",
        metavar="HOST[:PORT]",
        help=f"where it listens; default: {whereabouts.DEFAULT}",
    )
    where.add_argument("--run-dir", type=run_path, metavar="DIR", help="the one that runs on DIR")
    healthcheck.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0 if the coordinator serves, 1 if not.

    Raises:
        InvalidArgument: an option is invalid.
    """
    try:
        address = whereabouts.find_coordinator(args)
    except CoordinatorUnreachable as error:
        return healthcheck.said(error.coded)
    peer = Role.COORDINATOR
    # Any role may ask: in a container, the coordinator itself does.
    security = whereabouts.find_security(args, who_asks(args, (peer, *Role)))
    return healthcheck.check_health(args, address, security, peer, "psrpc.v1.Coordinator")
