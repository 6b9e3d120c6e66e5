"""Completes the result of ``coordinator up`` and prints it."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from coordinator.core.wording import step_of
from coordinator.launch.commands import UpOptions, resume_command, start_command
from coordinator.launch.fleet import Stamp, stamp
from coordinator.launch.restarts import Outcome
from coordinator.process.result import show_result, write_failure, write_restarts
from psrpc.core.errors import (
    JobFailed,
    PsError,
    disk_code,
    disk_reason,
    error_line,
)
from psrpc.core.names import CHECKPOINTS, SUMMARY
from psrpc.files.run_paths import read_summary
from psrpc.ops.exit_status import INTERRUPTED


class Earlier(NamedTuple):
    """The summary before the start of the run: its stamp and its content."""

    stamp: Stamp | None = None
    summary: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Completed:
    """A run that has ended, with its summary.

    Attributes:
        status: the exit status.
        reason: why ``status`` is not 0.
        details: lines to print before the error line.
        before: words to put before the reason in the error line, such as "job failed: ".
        served: whether the summary is that of an earlier start, since nothing was left to train.
    """

    status: int
    reason: str
    details: list[str]
    before: str
    summary: Mapping[str, Any]
    served: bool


def conclude(outcome: Outcome, options: UpOptions, earlier: Earlier, made: bool) -> int:
    """Completes the summary, prints the result and returns the exit status.

    Args:
        made: whether this command made the run directory; if so, a refused job removes it.
    """
    run_dir = options.run_dir
    if outcome.refused:
        print_error("\n".join(outcome.details))
        if made:
            # Nothing was trained, and a run directory would suggest otherwise.
            shutil.rmtree(run_dir)
        return outcome.exit_status
    ended = complete_summary(outcome, options, earlier)
    status, summary = ended.status, ended.summary
    if summary.get("global_step"):
        show_result(summary, run_dir)
    if ended.served and not status:
        print_error(f"nothing was left to train; {_more_of_it(summary)}")
    if status:
        print_error("\n".join(ended.details))
        interrupted = status == INTERRUPTED
        error = JobFailed(ended.reason)
        print_error(ended.reason if interrupted else error_line(error, ended.before))
    if status == INTERRUPTED:
        print_error(_lost(summary))
        print_error(_how_to_go_on(options))
    return status


def complete_summary(outcome: Outcome, options: UpOptions, earlier: Earlier) -> Completed:
    """Adds the restarts to the summary of a run that was not refused, and a failure if the
    coordinator has not recorded it."""
    run_dir = options.run_dir
    summary = read_summary(run_dir)
    if stamp(run_dir / SUMMARY) == earlier.stamp:
        # The summary belongs to an earlier run, or was never written.
        summary = {}
    reason, details = outcome.reason, outcome.details
    status, before = outcome.exit_status, ""
    if status == 0 and not summary:
        status, reason = 1, f"the coordinator left no {SUMMARY} in {run_dir}"
        # The cause that kept the coordinator from writing it may persist.
        _written(run_dir, partial(_probe, run_dir))
    elif status and summary.get("reason") and not outcome.own:
        if status != INTERRUPTED:
            reason, details, before = str(summary["reason"]), [], "job failed: "
    elif status and not (status == INTERRUPTED and summary.get("phase") == "done"):
        _written(run_dir, partial(write_failure, run_dir, Path(options.job).stem, reason, summary))
        summary = read_summary(run_dir)
    # If nothing was left to train, the coordinator has rewritten the earlier summary unchanged.
    served = bool(summary) and summary == earlier.summary
    if status == INTERRUPTED and not served and summary.get("phase") == "done":
        # The signal came when the job was done, while its processes ended.
        status, reason, details = 0, "", []
    if summary and not served:
        _written(run_dir, partial(write_restarts, run_dir, outcome.restarts, summary))
        summary = read_summary(run_dir)
    return Completed(status, reason, details, before, summary, served)


def _more_of_it(summary: Mapping[str, Any]) -> str:
    """Returns how to continue a run that is done, in words."""
    reason = str(summary.get("reason") or "")
    if reason.startswith("stopped early at "):
        return f"the run {reason}; more patience, --set 'stop_early=min:loss patience=N', goes on"
    return "--set epochs=N, of all epochs, goes on"


def _how_to_go_on(options: UpOptions) -> str:
    """Returns the command to continue after a run was stopped."""
    if any((options.run_dir / CHECKPOINTS).glob("step-*")):
        return f"go on with: {resume_command(options)}"
    if not options.run_dir.exists():
        return (
            f"run directory {options.run_dir} is gone, and nothing is saved; begin anew with: "
            f"{start_command(options)}"
        )
    return (
        f"nothing had been trained, and nothing is saved; begin anew with: {start_command(options)}"
    )


def _written(run_dir: Path, write: Callable[[], None]) -> None:
    """Calls ``write`` for the summary; prints a disk error, so that it does not cost the result."""
    try:
        write()
    except OSError as error:
        say_refused(f"{run_dir / SUMMARY} cannot be written: ", error, run_dir)


def _on_disk(run_dir: Path) -> str:
    """Returns what a run has left on disk, in words."""
    names = [path.name for path in (run_dir / CHECKPOINTS).glob("step-*")]
    newest = [f"{CHECKPOINTS}/{max(names)}"] if names else []
    kept = [*newest, *(name for name in (SUMMARY, "logs") if (run_dir / name).exists())]
    return f"{run_dir} keeps {', '.join(kept)} as they are" if kept else f"{run_dir} holds nothing"


def _lost(summary: Mapping[str, Any]) -> str:
    """Returns the warning that a stopped run could not save its last steps; empty if it could."""
    saved = step_of(summary.get("checkpoint") or "")
    step = summary.get("global_step") or 0
    if saved is None or saved >= step:
        return ""
    return (
        f"warning: step {step} could not be saved; the newest checkpoint is of step {saved}, "
        "and what came after it is done again"
    )


def say_refused(what: str, error: OSError, run_dir: Path) -> None:
    code = disk_code(error)
    left = f"; {_on_disk(run_dir)}" if code == "PS502" else ""
    print_error(error_line(PsError(f"{what}{disk_reason(error)}{left}", code=code)))


def _probe(run_dir: Path) -> None:
    """Raises OSError if a summary cannot be written in ``run_dir``."""
    with tempfile.TemporaryFile(dir=run_dir, buffering=0) as file:
        file.write(bytes(PROBE_NBYTES))


def print_error(text: str) -> None:
    if text:
        print(text, file=sys.stderr)  # noqa: T201


PROBE_NBYTES = 16 << 10
"""About the size of a summary."""
