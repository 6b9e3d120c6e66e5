"""Options that change what a job says, for whatever starts one."""

from __future__ import annotations

import argparse

from psrpc.core.policy import MODES


def add_override_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines ``--mode``, ``--replicas`` and ``--set``."""
    parser.add_argument("--mode", choices=MODES, help="overrides the job's mode")
    parser.add_argument(
        "--replicas", type=int, metavar="K", help="sync: micro-batches of one round"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a field of the job; may be repeated",
    )
