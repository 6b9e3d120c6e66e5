"""``coordinator status``: what a running job does, once, as a page or as JSON."""

from __future__ import annotations

import argparse
import json

from coordinator import whereabouts
from coordinator.client import CoordinatorClient
from coordinator.status_page import as_json, render_page
from psrpc.errors import CoordinatorUnreachable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator status``."""
    whereabouts.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print all that is known as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the status of a job; returns 0.

    Raises:
        CoordinatorUnreachable: no coordinator answers there; names the address.
        PsError: an option that cannot be used, or an answer that did not come in time.
    """
    address = whereabouts.find_coordinator(args)
    with CoordinatorClient(address) as client:
        try:
            status = client.get_job_status()
        except CoordinatorUnreachable:
            raise whereabouts.nobody_at(address) from None
    print(json.dumps(as_json(status), indent=1) if args.json else render_page(status))  # noqa: T201
    return 0
