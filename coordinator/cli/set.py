"""``coordinator set``: changes the consistency policy of a running job, or its processes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from coordinator.client.absence import check_way, no_answer
from coordinator.core.lifecycle import OVER
from coordinator.core.wording import in_words, step_of
from psrpc.core.errors import CoordinatorUnreachable, JobFailed
from psrpc.options import locate as whereabouts

if TYPE_CHECKING:
    from coordinator.client.client import CoordinatorClient
    from psrpc.v1 import coordinator_pb2 as pb
    from psrpc.v1.coordinator_pb2 import GetJobStatusResponse

POLL_S = 0.2
"""Interval between two checks of the change."""

DESCRIBE_S = 180.0
"""How long the coordinator may take to describe the job with other settings."""

CONNECT_S = 60.0
"""How long to wait for a coordinator that is being restarted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator set``."""
    parser.add_argument(
        "settings",
        nargs="+",
        metavar="KEY=VALUE",
        help="settings of the policy, such as mode=ssp staleness=4; those that are not named stay "
        "as far as they fit the mode, and none is what a setting is by default; or, of a job under "
        "`coordinator up`, dense=allreduce, slices=W, dense=shards: it is saved, and its processes "
        "start again",
    )
    whereabouts.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Requests the change and waits until the job follows it; returns 0.

    Raises:
        InvalidJob: settings that do not fit the mode, each other or the job; nothing was changed.
        NotReady: another change is under way, or training has not begun.
        JobFailed: the job ended before the change.
        CoordinatorUnreachable: no coordinator answers; names the address.
    """
    from coordinator.client.client import CoordinatorClient
    from coordinator.job.policy_settings import cluster_settings, parse_settings

    restarts = bool(cluster_settings(args.settings))
    if not restarts:
        parse_settings(args.settings)
    address = whereabouts.find_coordinator(args)
    with CoordinatorClient(address, whereabouts.find_security(args)) as client:
        run_dir = whereabouts.find_run(args)
        check_way(client, run_dir)
        if restarts:
            announce_change(
                f"{' '.join(args.settings)}: the coordinator describes the job anew with that, "
                "which may take as long as a start; the job trains on meanwhile"
            )
        try:
            asked = client.set_policy(args.settings, *([DESCRIBE_S] if restarts else []))
        except CoordinatorUnreachable:
            raise no_answer(client, run_dir=run_dir) from None
        if restarts and not asked.restart:
            announce_change(f"{' '.join(args.settings)}: the job has that already")
            return 0
        await_done = await_restart if restarts else await_policy
        announce_change(await_done(client, asked))
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

    def follows(status: GetJobStatusResponse) -> str:
        for change in status.policies:
            if (change.policy, change.settings) == (asked.policy, asked.settings):
                return f"policy {change.policy}: {change.settings} from step {change.global_step}"
        return ""

    return _await(client, f"policy {asked.policy}: {asked.settings}", follows, pause)


def await_restart(
    client: CoordinatorClient,
    asked: pb.SetPolicyResponse,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Waits until the job has ended its processes for the requested settings, or runs with them;
    as :func:`await_policy`."""
    wanted = in_words(dict(setting.split("=", 1) for setting in asked.restart))

    def follows(status: GetJobStatusResponse) -> str:
        if list(status.changed) != list(asked.restart):
            return ""
        step = step_of(status.newest_checkpoint)
        return f"{wanted}: the cluster starts again from step {step or 0}"

    return _await(client, wanted, follows, pause)


def _await(
    client: CoordinatorClient,
    wanted: str,
    follows: Callable[[GetJobStatusResponse], str],
    pause: Callable[[float], None],
) -> str:
    """Polls until ``follows`` returns a line for a status, and returns it."""
    from coordinator.client.patience import Patience

    said = ""
    patience = Patience(client, CONNECT_S, announce_change)
    while True:
        status = patience.persist(client.get_job_status)
        if line := follows(status):
            return line
        if status.phase in OVER:
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
