"""``coordinator status``: what a running job does, once or as it goes on, as a page or as JSON.

The JSON has the fields of ``GetJobStatusResponse``, which are described in
``protos/psrpc/v1/coordinator.proto``. Names and meanings stay; more may come.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from coordinator import whereabouts
from psrpc.errors import CoordinatorUnreachable

if TYPE_CHECKING:
    from coordinator.client import CoordinatorClient
    from psrpc.v1.coordinator_pb2 import GetJobStatusResponse

EVERY_S = 1.0
"""Between two looks with ``--watch``."""

AWAY_S = 60.0
"""How long ``--watch`` looks for a coordinator that is started again meanwhile."""

CLEAR = "\x1b[H\x1b[J"
"""Makes a terminal begin at its first line again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator status``."""
    whereabouts.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print all that is known as JSON")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="show it every second until the job ends; with --json, one line each time",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the status of a job; returns 0, or 130 if ``--watch`` was interrupted.

    Raises:
        CoordinatorUnreachable: no coordinator answers there; names the address.
        PsError: an option that cannot be used, or an answer that did not come in time.
    """
    from coordinator.client import CoordinatorClient

    address = whereabouts.find_coordinator(args)
    with CoordinatorClient(address, whereabouts.find_security(args)) as client:
        whereabouts.check_way(client)
        try:
            status = client.get_job_status()
        except CoordinatorUnreachable:
            raise whereabouts.nobody_answers(client) from None
        if not args.watch:
            print(_written(status, as_json=args.json, indent=1))  # noqa: T201
            return 0
        try:
            watch(client, status, as_json=args.json)
        except KeyboardInterrupt:
            return 130
    return 0


def watch(
    client: CoordinatorClient,
    status: GetJobStatusResponse,
    as_json: bool,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Shows ``status`` and what follows it, until the job ends.

    Raises:
        CoordinatorUnreachable: it has not answered for a minute.
    """
    from coordinator.lifecycle import ENDED

    clear = CLEAR if sys.stdout.isatty() and not as_json else ""
    while True:
        print(f"{clear}{_written(status, as_json)}", flush=True)  # noqa: T201
        if not as_json and not clear:
            print(flush=True)  # noqa: T201
        if status.phase in ENDED:
            return
        pause(EVERY_S)
        status = client.persist(client.get_job_status, AWAY_S, _say)


def _written(status: GetJobStatusResponse, as_json: bool, indent: int | None = None) -> str:
    from coordinator import status_page

    if not as_json:
        return status_page.render_page(status)
    return json.dumps(status_page.as_json(status), indent=indent)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201
