"""``coordinator audit``: shows changes in a run, each with its author."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from psrpc.core.errors import InvalidArgument
from psrpc.core.names import CERTS
from psrpc.options.declaration import run_path

_WHO = ("name", "serial", "user", "address")
_SHOWN = {"time", "what", "role", "fingerprint", *_WHO}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator audit``."""
    parser.description = (
        "Shows what authorised callers changed in a run, oldest first, and what was done to its "
        "certificates. Takes a directory of certificates, too."
    )
    parser.add_argument("directory", type=run_path, metavar="RUN_DIR")
    parser.add_argument("--json", action="store_true", help="print the lines as they are kept")


def run(args: argparse.Namespace) -> int:
    """Prints the log; returns 0.

    Raises:
        InvalidArgument: there is no audit log, or it cannot be read.
    """
    from coordinator.certificates.audit import AUDIT, read_audit

    directory: Path = args.directory
    lines: list[dict[str, Any]] = []
    for place in (directory, directory / CERTS):
        try:
            lines += read_audit(place / AUDIT)
        except OSError as error:
            raise InvalidArgument(f"cannot read {place / AUDIT}: {error.strerror}") from None
    if not lines:
        raise InvalidArgument(
            f"{directory} has no {AUDIT}; expected a run directory, or one of certificates",
            code="PS125",
        )
    lines.sort(key=lambda line: str(line.get("time", "")))
    for line in lines:
        sys.stdout.write((json.dumps(line) if args.json else record_as_text(line)) + "\n")
    return 0


def record_as_text(line: dict[str, Any]) -> str:
    """Returns a readable line: time, change, author and details, without terminal sequences."""
    from psrpc.core.text import sanitize

    who = " ".join(f"{key}={line[key]}" for key in _WHO if key in line)
    rest = " ".join(f"{key}={value}" for key, value in line.items() if key not in _SHOWN)
    parts = (line.get("time", "-"), line.get("what", "-"), who, rest)
    return sanitize("  ".join(str(part) for part in parts if part)).replace("\n", " ")
