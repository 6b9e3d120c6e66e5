"""``coordinator certs``: makes, renews, revokes and shows the certificates of a job."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from psrpc.core.text import counted
from psrpc.security.identity import Role, job_name

if TYPE_CHECKING:
    from datetime import datetime

DAYS = 365

ROLES = tuple(map(str, Role))


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
    add = commands.add_parser(
        "add",
        help="make a certificate for one machine, which can be revoked alone",
        description="Makes DIR/ROLE-NAME with ca.crt and a certificate of ROLE for one machine, to "
        "be copied there. Other machines of the role are not touched when it is revoked.",
    )
    _add_directory(add)
    add.add_argument("role", metavar="ROLE", choices=ROLES, help=", ".join(ROLES))
    add.add_argument("name", metavar="NAME", help="the machine's, in lower case")
    add.add_argument(
        "--host",
        action="store_true",
        help="worker: with a shard's certificate, too, to host parameters (dense=allreduce)",
    )
    for command in (init, renew, add):
        command.add_argument(
            "--days",
            type=int,
            default=DAYS,
            metavar="N",
            help="how long certificates are valid; default: %(default)s",
        )
    revoke = commands.add_parser(
        "revoke",
        help="make certificates count no more",
        description="Adds to DIR/crl.pem all certificates that bear NAME, or the one with SERIAL. "
        "Copy crl.pem to where the certificates of the other processes are: they read it without "
        "being started again, refuse these certificates and end their connections.",
    )
    _add_directory(revoke)
    revoke.add_argument("which", metavar="NAME|SERIAL", help="as `coordinator certs show` has them")
    show = commands.add_parser(
        "show", help="say who each certificate is, its end, and which are revoked"
    )
    _add_directory(show)


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns 0.

    Raises:
        InvalidArgument: a directory, a name or a number is invalid.
    """
    from datetime import UTC, datetime, timedelta

    from coordinator.certificates.authority import check_days, make_certificates
    from coordinator.certificates.members import (
        add_member,
        describe_certificates,
        earliest_end,
        renew_all,
        revoke,
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
            end = earliest_end(directory)
            if end - now > timedelta(days=args.within):
                _say(f"{directory}: certificates are valid until {end:%Y-%m-%d}; none is made")
                return 0
        job = renew_all(directory, now, args.days)
        _say(f"{directory}: new certificates of job {job}, for {counted(args.days, 'day')}")
        _note(directory, now, "certs renew", days=args.days)
    elif args.action == "add":
        role = Role(args.role)
        made = add_member(directory, role, args.name, now, args.days, host=args.host)
        _say(f"{made}: a certificate for {args.name} alone, for {counted(args.days, 'day')}")
        _say(f"copy it there, and use it with --certs {made.name}")
        _note(directory, now, "certs add", certificate=args.name, of=args.role, days=args.days)
    elif args.action == "revoke":
        serials = revoke(directory, args.which, now)
        for serial in serials:
            _say(f"revoked: serial {serial}")
        if serials:
            _say(f"copy {directory / 'crl.pem'} to where the certificates of other processes are")
            _note(directory, now, "certs revoke", which=args.which, serials=serials)
        else:
            _say(f"{args.which} was revoked before")
    else:
        _say(describe_certificates(directory, now))
    return 0


def _note(directory: Path, now: datetime, what: str, **details: object) -> None:
    """Adds a line to the audit log beside the certificates; a failure is a warning."""
    import getpass
    import socket

    from coordinator.certificates.audit import AUDIT, append, entry
    from psrpc.security.peer_certificate import NO_CERTIFICATE

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    details = {"user": user, "uid": os.getuid(), "host": socket.gethostname(), **details}
    try:
        append(directory / AUDIT, entry(now, what, NO_CERTIFICATE, "", **details))
    except OSError as error:
        sys.stderr.write(f"warning: no line in {directory / AUDIT}: {error.strerror}\n")


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR")


def _say(line: str) -> None:
    print(line)  # noqa: T201
