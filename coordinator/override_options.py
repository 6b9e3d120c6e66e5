"""Options that change what a job says, for whatever starts one."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from psrpc.errors import InvalidSetting
from psrpc.policy import MODES


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


def check_overrides(overrides: Iterable[str]) -> None:
    """Refuses what is no setting at all. Which settings there are, the job file says too, so the
    rest is for those who load it.

    Raises:
        InvalidSetting: names the setting.
    """
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip():
            raise InvalidSetting(
                f"--set {override}: expected key=value, for example epochs=3", code="PS104"
            )
