"""The command ``healthcheck`` of coordinators and shards, for containers. Importing this module is
fast."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from psrpc.options.security_options import add_security_arguments
from psrpc.security.identity import Role

if TYPE_CHECKING:
    from psrpc.security.credentials import Security

HEALTHY, UNHEALTHY, BAD_INPUT = 0, 1, 2

TIMEOUT_S = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator healthcheck`` and ``pserver healthcheck``, except the
    address."""
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--ready",
        action="store_true",
        help="whether it serves its part of the job; default: whether it lives, which it also does "
        "while it starts, waits for others or restores a checkpoint",
    )
    asked.add_argument("--service", default="", help="full name of the service to ask for")
    add_timeout(parser)
    add_security_arguments(parser, listens=False)


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """Defines ``--timeout``."""
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="how long to wait for an answer (default: %(default)s)",
    )


def check_health(
    args: argparse.Namespace, address: str, security: Security, peer: Role, service: str
) -> int:
    """Asks the gRPC health service of the server at ``address``, which has the role ``peer`` and
    serves ``service``.

    Returns:
        0 if the server is alive (with ``--ready``, if it serves); 1 if not, or if it does not
        answer.

    Raises:
        InvalidArgument: ``address`` is not valid, or needs certificates.
    """
    from psrpc.net.channel import parse_address
    from psrpc.net.health import why_unhealthy

    parse_address(address)
    return said(
        why_unhealthy(
            address, service if args.ready else args.service, args.timeout, security, peer
        )
    )


def said(reason: str) -> int:
    """Prints why the server is unhealthy, if ``reason`` is not empty. Returns the exit status."""
    if reason:
        print(f"unhealthy: {reason}", file=sys.stderr)  # noqa: T201
    return UNHEALTHY if reason else HEALTHY
