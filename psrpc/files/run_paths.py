"""Finds runs under ``runs/``, and reads how runs without a coordinator have ended."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

from psrpc.core.document import anything, flag, listed, mapped, maybe, real, record, text, whole
from psrpc.core.names import JOB, LOCK, RUNS, STARTING, SUMMARY
from psrpc.core.text import sanitize
from psrpc.files.storage import read_json, unreadable

LONGEST_TOKEN = 1024

RESTARTING = "restarting"
"""The phase in the summary of a run that has not ended: its cluster starts again."""


def newest_run(job: str | None = None) -> Path | None:
    """Returns the run under ``runs/`` that was started or resumed last; None if there is none.

    Compares the times of ``job.json``, because a start writes that file only when it can no longer
    be refused, while failed starts may change other files of a run. Without ``job``, a run that is
    just being started is preferred.

    Args:
        job: name of a job file, without suffix; only its runs are considered.
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
    """Whether a process is starting the run, and its coordinator does not serve yet."""
    return _is_held(run_dir / STARTING)


def unfinished_run(job: str) -> Path | None:
    """Returns the newest run of a job file, named without suffix, if it has not ended and no
    process runs or starts it."""
    run = newest_run(job)
    if run is None or read_ending(run) or is_starting(run) or is_running(run):
        return None
    return run


def is_running(run_dir: Path) -> bool:
    """Whether a coordinator runs on the run directory."""
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
    """Returns ``summary.json`` of an ended run; empty if the run has not ended, was started again
    since, or has an unreadable summary, see :func:`why_unreadable`."""
    ending = {} if is_starting(run_dir) else _newest_summary(run_dir)
    return {} if ending.get("phase") == RESTARTING else ending


def why_restarting(run_dir: Path) -> str:
    """Returns why a run has ended its processes to start them again, such as "stopped for
    dense=allreduce"; empty if it has not, or has started again."""
    ending = _newest_summary(run_dir)
    return sanitize(ending.get("reason") or "") if ending.get("phase") == RESTARTING else ""


def _newest_summary(run_dir: Path) -> dict[str, Any]:
    """Returns the summary of a run; empty if the run was started again since."""
    old = _written_ns(run_dir / SUMMARY) < _written_ns(run_dir / JOB)
    return {} if old else read_summary(run_dir)


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Returns the summary of a run; empty if it is missing or unreadable."""
    try:
        return _summary(run_dir)
    except (OSError, ValueError):
        return {}


def why_unreadable(run_dir: Path) -> str:
    """Returns why the summary of a run is unreadable; empty if it is readable or missing."""
    try:
        _summary(run_dir)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return unreadable(run_dir / SUMMARY, error)
    return ""


def _summary(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = _SUMMARY(read_json(run_dir / SUMMARY), "")
    return summary


_COUNT = maybe(whole())
_SMALL = maybe(whole(0, (1 << 32) - 1))
_REAL = maybe(real)
_NAMES = maybe(listed(text))
_EVALUATION = record({"evaluation": text, "global_step": whole()}, more=True)


def _evaluation(value: Any, where: str) -> Any:
    """Checks an evaluation; its unknown keys must be metrics."""
    metrics = dict(_EVALUATION(value, where))
    del metrics["evaluation"], metrics["global_step"]
    mapped(_REAL)(metrics, where)
    return value


_SUMMARY = record(
    {},
    {
        **dict.fromkeys(("run_id", "job", "phase", "reason", "mode", "checkpoint"), maybe(text)),
        **dict.fromkeys(("replicas", "epoch", "epochs", "shards", "workers", "tables"), _SMALL),
        **dict.fromkeys(("global_step", "total_steps", "eval_step", "batches"), _COUNT),
        **dict.fromkeys(
            ("examples", "refused", "skipped", "failed", "generation", "summed"), _COUNT
        ),
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
"""Checks the known keys of ``summary.json``. Others are allowed, since other versions may write
more or fewer."""


def ending_in_words(ending: dict[str, Any]) -> str:
    """Formats the ending of a run: ``"done"``, or ``"failed: "`` and the reason."""
    reason = sanitize(ending.get("reason") or "")
    return sanitize(ending.get("phase") or "ended") + (f": {reason}" if reason else "")


def _job_name(path: Path) -> str:
    try:
        return Path(str(mapped(anything)(read_json(path), "").get("job", ""))).stem
    except (OSError, ValueError):
        return ""


def _written_ns(path: Path) -> int:
    """Returns the modification time of a file; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
