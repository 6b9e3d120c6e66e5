"""``coordinator dashboard``: serves the page of a job that runs elsewhere to local browsers.

It calls the coordinator with an operator's certificate, so only its owner can view the job, and
unencrypted data stays on this machine.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from coordinator.client.absence import check_way
from psrpc.core.errors import CoordinatorUnreachable, InvalidArgument, PsError
from psrpc.options import locate as whereabouts
from psrpc.options.settings import DASHBOARD_PORT

if TYPE_CHECKING:
    from coordinator.client.client import CoordinatorClient
    from coordinator.dashboard.relay import Relay

STUDY = "study.json"
"""The file that makes a directory one of a study."""

EVERY_S = 1.0
"""Interval between two requests."""

AWAY_S = 120.0
"""Default of the seconds for which a coordinator may be away: as long as its members wait."""

LAST_LOOK_S = 4.0
"""Most seconds that the page stays for browsers to see the end of the job."""

INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator dashboard``."""
    parser.description = (
        "Shows a job that runs elsewhere to the browsers of this machine: the page that "
        "`--dashboard` shows beside the coordinator. Ends with 0 when the job has, with 2 when no "
        "coordinator answers. With a --run-dir that holds a study that has ended, it shows that "
        "until Ctrl-C."
    )
    whereabouts.add_arguments(parser)
    parser.add_argument(
        "--bind",
        default=f"127.0.0.1:{DASHBOARD_PORT}",
        metavar="HOST:PORT",
        help="where browsers find the page; port 0 is any; default: %(default)s",
    )
    parser.add_argument(
        "--public",
        action="store_true",
        help="allow a --bind that others reach: they see the page, which is not encrypted and does "
        "not ask who they are, and cannot change anything; --insecure allows it, too",
    )
    parser.add_argument(
        "--connect-timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for a coordinator that is not there yet; default: not at all",
    )
    parser.add_argument(
        "--away-timeout",
        type=float,
        default=AWAY_S,
        metavar="SECONDS",
        help="how long to go on when the coordinator is away; default: %(default)g",
    )


def run(args: argparse.Namespace) -> int:
    """Shows the job until it has ended; returns 0, or 130 if it was interrupted.

    Raises:
        CoordinatorUnreachable: no coordinator answers, or none has for ``--away-timeout``.
        AccessDenied: only one end uses TLS, or an end refuses the other's certificate.
        InvalidArgument: an option is invalid.
        PortInUse: another process has the port.
    """
    from coordinator.client.client import CoordinatorClient
    from coordinator.client.patience import Patience
    from coordinator.dashboard.relay import Relay
    from coordinator.dashboard.server import DashboardServer
    from coordinator.dashboard.site import job_site
    from psrpc.ops.process import on_stop_signals

    if not args.away_timeout > 0:
        raise InvalidArgument(f"--away-timeout is {args.away_timeout:g}; expected seconds above 0")
    if not args.connect_timeout >= 0:
        raise InvalidArgument(
            f"--connect-timeout is {args.connect_timeout:g}; expected seconds of at least 0"
        )
    run_dir = whereabouts.find_run(args)
    if args.run_dir is not None and (args.run_dir / STUDY).exists():
        from coordinator.studies.ended import serve_ended_study

        return serve_ended_study(args.run_dir, args.bind, args.public, announce)
    security = whereabouts.find_security(args)
    relay, stopped = Relay(time.monotonic), threading.Event()
    server = DashboardServer(
        args.bind,
        job_site(relay),
        args.public or security.insecure,
        option="--bind",
        instead="or --public if all who reach it may look",
    )
    with CoordinatorClient(whereabouts.find_coordinator(args), security) as client:
        try:
            server.start()
            if args.connect_timeout:
                on_stop_signals(lambda _number: stopped.set())
                patience = Patience(client, args.connect_timeout, announce, stopped)
                told = patience.persist(client.get_dashboard)
            else:
                check_way(client, run_dir)
                told = client.get_dashboard()
                on_stop_signals(lambda _number: stopped.set())
            relay.took(told)
            announce(f"dashboard {server.url} of the job at {client.address}")
            return follow_status(client, relay, stopped.wait, args.away_timeout)
        except CoordinatorUnreachable:
            if stopped.is_set():
                return INTERRUPTED
            raise
        finally:
            server.stop()


def follow_status(
    client: CoordinatorClient,
    relay: Relay,
    pause: Callable[[float], bool],
    away_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Passes the coordinator's answers to the relay until the job has ended.

    Args:
        pause: waits for the given seconds; returns whether to stop.
        away_s: how long the coordinator may be away.

    Returns:
        0, or 130 if ``pause`` asked to stop.

    Raises:
        PsError: the obstacle on the way to the coordinator, after ``away_s``.
    """
    heard, said = clock(), ""
    while not relay.ended:
        if pause(EVERY_S):
            return INTERRUPTED
        try:
            relay.took(client.get_dashboard())
        except PsError as error:
            why = error
            if isinstance(error, CoordinatorUnreachable):
                why = client.why_unreachable() or error
            relay.lost(why)
            if clock() - heard >= away_s:
                raise why from None
            if why.code != said:
                said = why.code
                announce(f"the coordinator is away: {why.coded}")
        else:
            heard = clock()
            if said:
                said = ""
                announce("the coordinator is back")
    announce("the job has ended")
    relay.subscribers.wait_until_seen(LAST_LOOK_S)
    return 0


def announce(line: str) -> None:
    """Prints a line and flushes it."""
    print(line, flush=True)  # noqa: T201
