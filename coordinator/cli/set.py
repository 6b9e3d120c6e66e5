"""``coordinator set``: changes the consistency policy of a running job."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from coordinator.client.absence import check_way, no_answer
from coordinator.core.lifecycle import ENDED
from psrpc.core.errors import CoordinatorUnreachable, JobFailed
from psrpc.options import locate as whereabouts

if TYPE_CHECKING:
    from coordinator.client.client import CoordinatorClient
    from psrpc.v1 import coordinator_pb2 as pb

POLL_S = 0.2
"""Interval between two checks of the change."""

CONNECT_S = 60.0
"""How long to wait for a coordinator that is being restarted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator set``."""
    parser.add_argument(
        "settings",
        nargs="+",
        metavar="KEY=VALUE",
        help="settings of the policy, such as mode=ssp staleness=4; those that are not named stay "
        "as far as they fit the mode, and none is what a setting is by default",
    )
    whereabouts.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Requests the policy and waits until the job follows it; returns 0.

    Raises:
        InvalidJob: settings that do not fit the mode, each other or the job; nothing was changed.
        NotReady: another change is under way, or training has not begun.
        JobFailed: the job ended before the change.
        CoordinatorUnreachable: no coordinator answers; names the address.
    """
    from coordinator.client.client import CoordinatorClient
    from coordinator.job.policy_settings import parse_settings

    parse_settings(args.settings)
    address = whereabouts.find_coordinator(args)
    with CoordinatorClient(address, whereabouts.find_security(args)) as client:
        run_dir = whereabouts.find_run(args)
        check_way(client, run_dir)
        try:
            asked = client.set_policy(args.settings)
        except CoordinatorUnreachable:
            raise no_answer(client, run_dir=run_dir) from None
        announce_change(await_policy(client, asked))
    return 0


def await_policy(
    client: CoordinatorClient,
    asked: pb.SetPolicyResponse,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Waits until the job follows the requested policy, and prints the progress.

    Returns:
        A line with the policy and its first step.

    Raises:
        JobFailed: the job ended before, or its coordinator died before it had stored the change.
        CoordinatorUnreachable: the coordinator does not answer any more.
    """
    from coordinator.client.patience import Patience

    wanted = f"policy {asked.policy}: {asked.settings}"
    said = ""
    patience = Patience(client, CONNECT_S, announce_change)
    while True:
        status = patience.persist(client.get_job_status)
        for change in status.policies:
            if (change.policy, change.settings) == (asked.policy, asked.settings):
                return f"policy {change.policy}: {change.settings} from step {change.global_step}"
        if status.phase in ENDED:
            raise JobFailed(f"the job is {status.phase} before it came to {wanted}")
        if not status.switching:
            raise JobFailed(
                f"{wanted} does not come about: the job is {status.phase}, and no change is under "
                f"way any more; policy {status.policy} ({status.settings}) stands"
            )
        if status.switching != said:
            said = status.switching
            announce_change(said)
        pause(POLL_S)


def announce_change(line: str) -> None:
    """Prints a line and flushes it."""
    print(line, flush=True)  # noqa: T201
