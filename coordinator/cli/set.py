"""``coordinator set``: a running job comes to follow another consistency policy."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from coordinator.client.absence import check_way, nobody_answers
from coordinator.core.lifecycle import ENDED
from psrpc.core.errors import CoordinatorUnreachable, JobFailed
from psrpc.options import locate as whereabouts

if TYPE_CHECKING:
    from coordinator.client.client import CoordinatorClient
    from psrpc.v1 import coordinator_pb2 as pb

POLL_S = 0.2
"""Between two looks at what has become of the change."""

CONNECT_S = 60.0
"""How long a coordinator that is started again meanwhile is looked for."""


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
    """Asks for the policy and waits until the job follows it; returns 0.

    Raises:
        InvalidJob: settings that do not fit the mode, each other or the job; nothing was changed.
        NotReady: another change is under way, or nobody trains yet.
        JobFailed: the job ended before it came to that.
        CoordinatorUnreachable: no coordinator answers there; names the address.
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
            raise nobody_answers(client, run_dir=run_dir) from None
        say(await_policy(client, asked))
    return 0


def await_policy(
    client: CoordinatorClient,
    asked: pb.SetPolicyResponse,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Waits until the job follows the policy that was ``asked`` for, and prints how far it is.

    Returns:
        Since when it does, in words.

    Raises:
        JobFailed: the job ended before, or its coordinator died before it had stored the change.
        CoordinatorUnreachable: it does not answer any more.
    """
    wanted = f"policy {asked.policy}: {asked.settings}"
    said = ""
    while True:
        status = client.persist(client.get_job_status, CONNECT_S, say)
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
            say(said)
        pause(POLL_S)


def say(line: str) -> None:
    """Prints a line at once, for somebody who waits."""
    print(line, flush=True)  # noqa: T201
