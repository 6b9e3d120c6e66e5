"""Messages for the user when the disk refuses the run directory."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

from coordinator.process.options import ServeOptions
from coordinator.records.ledger_file import LEDGER_NBYTES, DamagedLedger, damaged_ledger
from coordinator.records.run_directory import RunDirectory
from psrpc.core.errors import JobFailed, PsError, disk_code, disk_reason
from psrpc.core.plan import Plan

PASSING = ("PS122", "PS502", "PS504")
"""Codes of errors that block the run directory for a time only: another coordinator holds it, the
storage is full, or the storage fails."""


@contextlib.contextmanager
def disk_errors_named(plan: Plan) -> Iterator[None]:
    """Turns disk errors into errors that name the run directory, and advise: all files that
    ``serve`` itself touches are there."""
    try:
        yield
    except DamagedLedger as error:
        raise damaged_ledger(error) from error
    except (OSError, sqlite3.Error) as error:
        code = disk_code(error)
        advice = _room(plan) if code == "PS502" else "see what is wrong with the disk"
        raise JobFailed(
            f"the run directory cannot be used: {_words(error)}; {advice}, or choose another "
            "--run-dir",
            code=code,
        ) from error


def _room(plan: Plan) -> str:
    checkpoint = sum(plan.shard_nbytes(shard) for shard in range(plan.shards))
    return (
        f"a run takes {LEDGER_NBYTES / 1e6:.1f} MB for its ledger and at least "
        f"{checkpoint / 1e6:.1f} MB for each checkpoint; make room"
    )


def _words(error: OSError | sqlite3.Error) -> str:
    if not isinstance(error, OSError):
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    # For a full disk, the advice that follows names the space to free.
    return f"{where}{error.strerror if disk_code(error) == 'PS502' else disk_reason(error)}"


@contextlib.contextmanager
def hold_directory(directory: RunDirectory, options: ServeOptions) -> Iterator[RunDirectory]:
    """Holds the run directory. Under a supervisor, an error that may be gone at the next start
    (the earlier coordinator is still leaving, storage is full or missing) becomes JobFailed."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(directory)
        except PsError as error:
            if options.auto_resume and error.code in PASSING:
                raise JobFailed(str(error), code=error.code) from error
            raise
        yield directory
