"""``coordinator certs``: makes, renews and shows the certificates of a job."""

from __future__ import annotations

import argparse
from pathlib import Path

from psrpc.identity import job_name
from psrpc.plural import counted

DAYS = 365


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the subcommands of ``coordinator certs``."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    init = commands.add_parser(
        "init",
        help="make DIR with an authority and a certificate for each role",
        description="Makes DIR with a certificate authority for one job and a certificate for each "
        "role. Copy to each machine ca.crt and the two files of the role that runs there; ca.key "
        "stays.",
    )
    _add_directory(init)
    init.add_argument(
        "--job", metavar="NAME", help="the job's name in certificates; default: DIR's own name"
    )
    renew = commands.add_parser(
        "renew",
        help="make new certificates of the same authority",
        description="Makes a new key and certificate for each role. Processes that run take them "
        "at their next connection, once they are copied to where theirs are.",
    )
    _add_directory(renew)
    renew.add_argument(
        "--within",
        type=int,
        metavar="N",
        help="only if one of them expires within N days; default: in any case",
    )
    for command in (init, renew):
        command.add_argument(
            "--days",
            type=int,
            default=DAYS,
            metavar="N",
            help="how long certificates are valid; default: %(default)s",
        )
    _add_directory(commands.add_parser("show", help="say who each certificate is and its end"))


def run(args: argparse.Namespace) -> int:
    """Does what was asked; returns 0.

    Raises:
        InvalidArgument: a directory, a name or a number that cannot be used.
    """
    from datetime import UTC, datetime, timedelta

    from coordinator.certs import (
        check_days,
        describe_certificates,
        first_end,
        make_certificates,
        renew_certificates,
    )

    now, directory = datetime.now(UTC), args.directory
    if args.action == "init":
        job = args.job if args.job is not None else job_name(directory.absolute().name)
        make_certificates(directory, job, now, args.days)
        _say(f"{directory}: certificates of job {job}, for {counted(args.days, 'day')}")
        _say(f"use them with --certs {directory} on every command; keep ca.key where it is")
    elif args.action == "renew":
        if args.within is not None:
            check_days(args.within, "--within")
            end = first_end(directory)
            if end - now > timedelta(days=args.within):
                _say(f"{directory}: certificates are valid until {end:%Y-%m-%d}; none is made")
                return 0
        job = renew_certificates(directory, now, args.days)
        _say(f"{directory}: new certificates of job {job}, for {counted(args.days, 'day')}")
    else:
        _say(describe_certificates(directory, now))
    return 0


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR")


def _say(line: str) -> None:
    print(line)  # noqa: T201
