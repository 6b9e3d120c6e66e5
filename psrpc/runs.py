"""The runs under ``runs/``: which is the newest, and how one ended whose coordinator is gone."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

RUNS = Path("runs")
ADDRESS = "address"
JOB = "job.json"
CERTS = "certs"
"""Certificates of the run, where it made them itself."""

PLAINTEXT = "plaintext"
"""There while a coordinator answers without certificates, whether or not the run has some."""

SUMMARY = "summary.json"

LOCK = "lock"
"""Held by the coordinator of the run."""

STARTING = "starting"
"""Locked by who starts the run, until its coordinator serves."""


def newest_run(job: str | None = None) -> Path | None:
    """The run under ``runs/`` that was started, or gone on with, last; None if there is none.

    What counts is when ``job.json`` was written: a start does that once nothing can refuse it any
    more. All other files of a run are touched by starts that come to nothing, too. A run that is
    being started now comes first, as long as it may yet come to something.

    Args:
        job: only of the job file called so, without its suffix.
    """
    if job is None:
        starting = [path for path in RUNS.glob(f"*/{STARTING}") if is_starting(path.parent)]
        if starting:
            return max(starting, key=_written_ns).parent
    found = ((_written_ns(path), path) for path in RUNS.glob(f"*/{JOB}"))
    for written, path in sorted(found, reverse=True):
        if written and (job is None or _job_name(path) == job):
            return path.parent
    return None


def is_starting(run_dir: Path) -> bool:
    """Whether somebody starts the run, whose coordinator does not serve yet."""
    return _is_held(run_dir / STARTING)


def unfinished_run(job: str) -> Path | None:
    """The newest run of the job file called so, without its suffix, if it has not ended and nobody
    goes on with it."""
    found = newest_run(job)
    if found is None or read_ending(found) or is_starting(found) or _is_held(found / LOCK):
        return None
    return found


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)


def read_ending(run_dir: Path) -> dict[str, Any]:
    """What ``summary.json`` says of a run that has ended; empty if it has not, or was started again
    since."""
    if is_starting(run_dir) or _written_ns(run_dir / SUMMARY) < _written_ns(run_dir / JOB):
        return {}
    return _read(run_dir / SUMMARY)


def ending_in_words(ending: dict[str, Any]) -> str:
    """``"done"``, or ``"failed: "`` and the reason."""
    reason = ending.get("reason")
    return f"{ending.get('phase') or 'ended'}" + (f": {reason}" if reason else "")


def _job_name(path: Path) -> str:
    return Path(str(_read(path).get("job", ""))).stem


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _written_ns(path: Path) -> int:
    """When the file was written; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
