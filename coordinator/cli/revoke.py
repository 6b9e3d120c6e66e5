"""``coordinator revoke``: ends a worker's part in a running job."""

from __future__ import annotations

import argparse

from coordinator.client.absence import check_way, no_answer
from psrpc.core.errors import CoordinatorUnreachable
from psrpc.options import locate as whereabouts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator revoke``."""
    parser.add_argument(
        "worker", metavar="WORKER", help="its name, such as worker-3; `coordinator status` has it"
    )
    parser.add_argument(
        "--bar",
        action="store_true",
        help="its process may not register again; otherwise it does at once, under another name",
    )
    parser.add_argument(
        "--reason", default="", metavar="TEXT", help="stands in the coordinator's log"
    )
    whereabouts.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Ends the worker's session; returns 0.

    Raises:
        InvalidArgument: the job has no such worker; nothing was changed.
        CoordinatorUnreachable: no coordinator answers; names the address.
    """
    from coordinator.client.client import CoordinatorClient

    address = whereabouts.find_coordinator(args)
    with CoordinatorClient(address, whereabouts.find_security(args)) as client:
        run_dir = whereabouts.find_run(args)
        check_way(client, run_dir)
        try:
            # Incarnation 0: the process that has the name now.
            client.revoke_worker(args.worker, 0, args.reason, bar=args.bar)
        except CoordinatorUnreachable:
            raise no_answer(client, run_dir=run_dir) from None
    after = "its process may not register again" if args.bar else "its process may register again"
    print(f"revoked {args.worker}: its batches go to others; {after}")  # noqa: T201
    return 0
