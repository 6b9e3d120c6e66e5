"""The options for the dashboard's address. Imports nothing slow."""

from __future__ import annotations

import argparse

DEFAULT_PORT = 5080

ANYWHERE = "127.0.0.1:0"
"""A free port of this machine, reachable from this machine alone."""


def add_dashboard_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options for a command with a dashboard by default."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--dashboard",
        default=ANYWHERE,
        metavar="HOST:PORT",
        help="where browsers can look at the job; default: a free port, for this machine alone",
    )
    where.add_argument(
        "--no-dashboard", dest="dashboard", action="store_const", const=None, help="nowhere"
    )
