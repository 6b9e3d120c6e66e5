"""The runs under ``runs/``: which is the newest, and how one ended whose coordinator is gone."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

from psrpc.core.document import anything, flag, listed, mapped, maybe, real, record, text, whole
from psrpc.core.names import JOB, LOCK, RUNS, STARTING, SUMMARY
from psrpc.core.text import told
from psrpc.files.storage import read_json, unreadable

LONGEST_TOKEN = 1024


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
    if found is None or read_ending(found) or is_starting(found) or is_running(found):
        return None
    return found


def is_running(run_dir: Path) -> bool:
    """Whether a coordinator holds the run directory."""
    return _is_held(run_dir / LOCK)


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)
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
    since, or what it says cannot be read, see :func:`why_unreadable`."""
    if is_starting(run_dir) or _written_ns(run_dir / SUMMARY) < _written_ns(run_dir / JOB):
        return {}
    return read_summary(run_dir)


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The summary of a run; empty when there is none that can be read."""
    try:
        return _summary(run_dir)
    except (OSError, ValueError):
        return {}


def why_unreadable(run_dir: Path) -> str:
    """What is wrong with the summary of a run; empty if nothing is, or there is none."""
    try:
        _summary(run_dir)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return unreadable(run_dir / SUMMARY, error)
    return ""


def _summary(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = _SUMMARY(read_json(run_dir / SUMMARY), "")
    return found


_COUNT = maybe(whole())
_SMALL = maybe(whole(0, (1 << 32) - 1))
_REAL = maybe(real)
_NAMES = maybe(listed(text))
_EVALUATION = record({"evaluation": text, "global_step": whole()}, more=True)


def _evaluation(value: Any, where: str) -> Any:
    """Passes an evaluation, whose other keys are metrics."""
    found = dict(_EVALUATION(value, where))
    del found["evaluation"], found["global_step"]
    mapped(_REAL)(found, where)
    return value


_SUMMARY = record(
    {},
    {
        **dict.fromkeys(("run_id", "job", "phase", "reason", "mode", "checkpoint"), maybe(text)),
        **dict.fromkeys(("replicas", "epoch", "epochs", "shards", "workers", "tables"), _SMALL),
        **dict.fromkeys(("global_step", "total_steps", "eval_step", "batches"), _COUNT),
        **dict.fromkeys(("examples", "refused", "skipped", "failed", "generation"), _COUNT),
        **dict.fromkeys(("loss", "wall_s", "train_s"), _REAL),
        **dict.fromkeys(("steps_per_s", "batches_per_s", "examples_per_s"), _REAL),
        "mean_staleness": _REAL,
        "policy": maybe(record({}, {"policy": _COUNT, "words": maybe(text)}, more=True)),
        "eval": maybe(mapped(_REAL)),
        "best": maybe(
            record(
                {"epoch": whole(), "checkpoint": text},
                {"global_step": _COUNT, "by": text, "restored": flag},
                more=True,
            )
        ),
        "evaluations": maybe(listed(_evaluation)),
        "staleness_counts": maybe(listed(whole())),
        "warnings": _NAMES,
        "growing_tables": _NAMES,
        "restarts": maybe(mapped(whole())),
        "counted": maybe(
            record(
                dict.fromkeys(("batches", "counted", "skipped", "twice"), whole())
                | dict.fromkeys(("missing_batches", "skipped_batches"), listed(text)),
                more=True,
            )
        ),
    },
    more=True,
)
"""What is read of ``summary.json``; versions write more of it, or less."""


def ending_in_words(ending: dict[str, Any]) -> str:
    """``"done"``, or ``"failed: "`` and the reason."""
    reason = told(ending.get("reason") or "")
    return told(ending.get("phase") or "ended") + (f": {reason}" if reason else "")


def _job_name(path: Path) -> str:
    try:
        return Path(str(mapped(anything)(read_json(path), "").get("job", ""))).stem
    except (OSError, ValueError):
        return ""


def _written_ns(path: Path) -> int:
    """When the file was written; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
