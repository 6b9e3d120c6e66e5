"""The command ``healthcheck`` of coordinators and shards, for containers. Imports nothing that
takes long before it asks."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from psrpc.errors import InvalidArgument, error_line
from psrpc.identity import Role
from psrpc.security_options import add_security_arguments

if TYPE_CHECKING:
    from psrpc.security import Security

HEALTHY, UNHEALTHY, BAD_INPUT = 0, 1, 2

TIMEOUT_S = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator healthcheck`` and ``pserver healthcheck``."""
    parser.add_argument(
        "address",
        nargs="?",
        default="localhost:5000",
        metavar="HOST:PORT",
        help="where it listens (default: %(default)s)",
    )
    parser.add_argument("--service", default="", help="full name; default: the whole server")
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


def check(args: argparse.Namespace, peer: Role) -> int:
    """Asks the server's gRPC health service.

    Args:
        peer: what the server is.

    Returns:
        0 when it serves; 1 when it does not, or does not answer; 2 for what cannot be asked.
    """
    from psrpc.channel import parse_address
    from psrpc.health import why_unhealthy

    try:
        parse_address(args.address)
        security = _security(args, peer)
        reason = why_unhealthy(args.address, args.service, args.timeout, security, peer)
    except InvalidArgument as error:
        print(error_line(error), file=sys.stderr)  # noqa: T201
        return BAD_INPUT
    return said(reason)


def said(reason: str) -> int:
    """The exit status, after one line if there is a reason not to be healthy."""
    if reason:
        print(f"unhealthy: {reason}", file=sys.stderr)  # noqa: T201
    return UNHEALTHY if reason else HEALTHY


def _security(args: argparse.Namespace, peer: Role) -> Security:
    """Everybody may ask, so any role does whose certificate is there: in a container that of the
    server itself."""
    from psrpc.certificates import certificate_name
    from psrpc.security_options import certificates_directory, from_arguments

    certs = certificates_directory(args)
    found = (role for role in (peer, *Role) if certs and (certs / certificate_name(role)).exists())
    return from_arguments(next(found, Role.OPERATOR), args)
