"""The command line of ``coordinator healthcheck``."""

from __future__ import annotations

import argparse

from psrpc import healthcheck
from psrpc.identity import Role


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator healthcheck``."""
    healthcheck.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0 when the coordinator serves, 1 when not, 2 for what cannot be asked."""
    return healthcheck.check(args, Role.COORDINATOR)
