"""``summary.json``, the result of a run, as ``coordinator up`` reads and shows it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from coordinator.core.lifecycle import STOPPED
from coordinator.core.wording import duration, figure
from coordinator.process.summary import write_summary
from psrpc.core.text import sanitize
from psrpc.v1 import coordinator_pb2 as pb


def write_failure(run_dir: Path, job: str, reason: str, known: Mapping[str, Any]) -> None:
    """Records that the job failed for a reason unknown to its coordinator.

    Args:
        known: the coordinator's summary, kept except for the phase and the reason.
    """
    write_summary(run_dir, {"job": job, **known, "phase": "failed", "reason": reason})


def write_restarts(run_dir: Path, restarts: Mapping[str, int], known: Mapping[str, Any]) -> None:
    """Adds to a summary the restarts of each process that had any, which are unknown to its
    coordinator."""
    write_summary(run_dir, {**known, "restarts": dict(sorted(restarts.items()))})


def as_status(summary: Mapping[str, Any], run_dir: Path) -> pb.GetJobStatusResponse:
    """Returns the status of a run that has ended, as far as its summary knows it."""
    policy = summary.get("policy") or {}
    steps = summary.get("global_step") or 0
    done = summary.get("phase") == "done"
    status = pb.GetJobStatusResponse(
        phase=summary.get("phase") or "",
        policy=policy.get("policy") or 0,
        settings=policy.get("words") or "",
        # Earlier versions did not write total_steps.
        total_steps=summary.get("total_steps") or (steps if done else 0),
        loss=math.nan,
        newest_checkpoint=summary.get("checkpoint") or "",
        checkpoint_age_s=-1,
        checkpoint_interval_s=-1,
        run_dir=str(run_dir),
        free_nbytes=-1,
    )
    for name in _SAME:
        if summary.get(name) is not None:
            setattr(status, name, summary[name])
    status.staleness_counts.extend(summary.get("staleness_counts") or ())
    status.warnings.extend(summary.get("warnings") or ())
    if counted := summary.get("counted"):
        # Later versions may know more.
        known = {name: counted[name] for name in _COUNTED if name in counted}
        status.counted.CopyFrom(pb.BatchesCounted(**known))
    for found in summary.get("evaluations") or ():
        values = {k: v for k, v in found.items() if k not in ("evaluation", "global_step")}
        status.evaluations.add(
            evaluation=found["evaluation"],
            global_step=found["global_step"],
            # JSON has no NaN.
            results={k: math.nan if v is None else v for k, v in values.items()},
        )
    return status


_COUNTED = tuple(pb.BatchesCounted.DESCRIPTOR.fields_by_name)
_SAME = (
    "run_id",
    "job",
    "reason",
    "mode",
    "replicas",
    "global_step",
    "epoch",
    "epochs",
    "loss",
    "batches",
    "examples",
    "mean_staleness",
    "refused",
    "skipped",
    "failed",
    "generation",
    "summed",
)
"""Fields of the same meaning in a summary and a status. Rates differ: a summary's are means."""


def show_result(summary: Mapping[str, Any], run_dir: Path) -> None:
    """Prints the figures of a finished run and the command that exports its model, in one line to
    copy."""
    console = Console()
    console.print(result_table(summary, run_dir))
    command = export_command(summary, run_dir)
    if command:
        console.print(Text(f"to use the model: {command}"), soft_wrap=True)


def result_table(summary: Mapping[str, Any], run_dir: Path) -> Table:
    """Returns the figures of a finished run in two columns; skips those the summary lacks."""
    # To the user who stopped the job, that is not a failure.
    phase = "stopped" if summary.get("reason") == STOPPED else summary.get("phase", "?")
    title = escape(sanitize(f"{summary.get('job', run_dir.name)}: {phase}"))
    table = Table("", "", title=title)
    table.show_header = False
    table.columns[1].justify = "right"
    # Fold, not cut: a shortened path is useless.
    table.columns[1].overflow = "fold"
    for label, value in _rows(summary, run_dir):
        if value is not None:
            table.add_row(escape(sanitize(label)), escape(sanitize(value)))
    return table


def _rows(summary: Mapping[str, Any], run_dir: Path) -> list[tuple[str, str | None]]:
    def count(key: str) -> str | None:
        value = summary.get(key)
        return None if value is None else _grouped(value)

    def number(key: str, form: str) -> str | None:
        value = summary.get(key)
        return None if value is None else form.format(value)

    def seconds(key: str) -> str | None:
        value = summary.get(key)
        return None if value is None else duration(value)

    replicas = summary.get("replicas")
    mode = summary.get("mode")
    if mode and replicas:
        mode = f"{mode}, {replicas} replicas"
    evaluated = summary.get("eval") or {}
    return [
        ("mode", mode),
        ("shards", count("shards")),
        ("slices", count("slices")),
        ("workers", count("workers")),
        ("steps", count("global_step")),
        ("rounds with sums", count("summed")),
        ("micro-batches", count("batches")),
        ("examples", count("examples")),
        *_counted(summary),
        ("seconds in all", seconds("wall_s")),
        ("seconds in training", seconds("train_s")),
        ("micro-batches per second", number("batches_per_s", "{:.1f}")),
        ("examples per second", number("examples_per_s", "{:.0f}")),
        ("mean staleness", None if replicas else number("mean_staleness", "{:.2f}")),
        # JSON has no NaN: it is null in the summary.
        *(
            (f"eval.{name}", "not finite" if value is None else figure(value))
            for name, value in sorted(evaluated.items(), key=lambda item: item[0] != "loss")
        ),
        ("evaluated at step", _evaluated_before(summary)),
        ("refused, skipped, failed", _counts(summary)),
        ("generations", count("generation")),
        ("restarts", _restarts(summary)),
        ("stopped early", _after_early_stop(summary)),
        ("checkpoint", summary.get("checkpoint") or None),
        ("best epoch", _best(summary)),
        ("run directory", str(run_dir)),
    ]


def _after_early_stop(summary: Mapping[str, Any]) -> str | None:
    """Returns the reason of a run that stopped early by itself."""
    reason = summary.get("reason") if summary.get("phase") == "done" else None
    return reason.removeprefix("stopped early ") if reason else None


def _best(summary: Mapping[str, Any]) -> str | None:
    best = summary.get("best")
    if best is None:
        return None
    words = f"{best['epoch']}, in {best['checkpoint']}"
    if best.get("restored", True) or best["checkpoint"] == summary.get("checkpoint"):
        return words
    value = best.get(best.get("by", ""))
    result = f" ({best['by']} {value:.4g})" if isinstance(value, int | float) else ""
    step = best.get("global_step")
    # None in a run that an earlier version began.
    takes = "" if step is None else f"; coordinator export takes it with --step {step}"
    return f"{words}{result}{takes}"


def export_command(summary: Mapping[str, Any], run_dir: Path) -> str:
    """Returns the command that exports the model of a run; empty if the job is not done."""
    if summary.get("phase") != "done" or not summary.get("checkpoint"):
        return ""
    into = "--to model.keras"
    if summary.get("growing_tables"):
        # Growing tables may be larger than any one machine.
        into = "--tables tables"
    elif summary.get("tables"):
        # A Keras file has no combiner, no padding and no strings.
        into = "--to model/"
    return f"coordinator export {shlex.quote(str(run_dir))} {into}"


def _counted(summary: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Returns the batches in the last checkpoint of the shards; empty if unknown."""
    found = summary.get("counted")
    if not found:
        return []
    batches, counted, twice = found["batches"], found["counted"], found["twice"]
    done = summary.get("phase") == "done"
    label = "batches counted" if twice else "batches counted once"
    missing = _named(found["missing_batches"], batches - counted)
    return [
        (
            label if done else "batches in the checkpoint",
            f"{_grouped(counted)} of {_grouped(batches)}",
        ),
        ("twice on some shards, at most", _grouped(twice) if twice else None),
        # Runs that were stopped, or stopped early, have batches left to do.
        ("missing", missing if done and not summary.get("reason") else None),
        ("skipped", _named(found["skipped_batches"], found["skipped"])),
    ]


def _named(names: Sequence[str], of_all: int) -> str | None:
    more = [f"{of_all - len(names)} more"] if of_all > len(names) else []
    return ", ".join([*names, *more]) or None


def _evaluated_before(summary: Mapping[str, Any]) -> str | None:
    """Returns the step of the last evaluation of a run that has trained on since."""
    step = summary.get("eval_step")
    return None if step in (None, summary.get("global_step")) else _grouped(step)


def _grouped(value: int) -> str:
    return f"{value:,}".replace(",", " ")


def _counts(summary: Mapping[str, Any]) -> str | None:
    values = [summary.get(key) for key in ("refused", "skipped", "failed")]
    return None if None in values else ", ".join(map(str, values))


def _restarts(summary: Mapping[str, Any]) -> str | None:
    restarts = summary.get("restarts")
    if not restarts:
        return None if restarts is None else "0"
    names = ", ".join(f"{name} {times}" for name, times in restarts.items())
    return f"{sum(restarts.values())} ({names})"
