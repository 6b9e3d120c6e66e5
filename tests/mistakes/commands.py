"""Runs a command as a user would, in this process, and reads what it says in the end."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import structlog

import coordinator.cli.__main__
import pserver.cli.__main__
import worker.cli.__main__
from psrpc.ops.process import MALLOC_SETTINGS

PROGRAMS: dict[str, Callable[[Sequence[str]], int]] = {
    "coordinator": coordinator.cli.__main__.main,
    "pserver": pserver.cli.__main__.run,
    "worker": worker.cli.__main__.run,
}

SAID: list[str] = []
"""Codes of errors that a test has met, for the report; who makes it takes them out."""

_GRPC = re.compile(r"[IWE]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+\.cc:\d+\] ")

LAST = re.compile(r"error (PS\d{3}): (.*)")


@dataclass(frozen=True)
class Said:
    """Exit status and output of a command.

    Attributes:
        status: its exit status.
        code: of its error; empty if it ended without.
        message: of its error.
        everything: standard output and standard error.
    """

    status: int
    code: str
    message: str
    everything: str


def say(capfd: pytest.CaptureFixture[str], *command: object) -> Said:
    """Runs ``program argument ...``. No traceback may come of it but that of the user's code."""
    program, *arguments = map(str, command)
    capfd.readouterr()
    # With these a process need not start itself again to have them.
    with patch.dict(os.environ, MALLOC_SETTINGS):
        try:
            status = PROGRAMS[program](arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
        finally:
            # Logs go to what standard error is now, and that is closed after this test.
            structlog.reset_defaults()
    out, err = capfd.readouterr()
    # A thread of gRPC's may have its say of a handshake after that.
    lines = [line for line in err.strip().splitlines() if not _GRPC.match(line)]
    found = LAST.fullmatch(lines[-1]) if lines else None
    assert sum(LAST.search(line) is not None for line in lines) <= 1, "the error is said once"
    if found:
        SAID.append(found[1])
    return Said(status, found[1] if found else "", found[2] if found else "", out + err)
