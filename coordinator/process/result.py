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
from coordinator.core.wording import duration
from coordinator.process.summary import write_summary
from psrpc.core.text import told
from psrpc.v1 import coordinator_pb2 as pb


def write_failure(run_dir: Path, job: str, reason: str, known: Mapping[str, Any]) -> None:
    """Records that the job failed for a reason that its coordinator could not know.

    Args:
        known: what the coordinator had written, kept as it is beside the phase and the reason.
    """
    write_summary(run_dir, {"job": job, **known, "phase": "failed", "reason": reason})


def write_restarts(run_dir: Path, restarts: Mapping[str, int], known: Mapping[str, Any]) -> None:
    """Adds to a summary how often each process was started again, which its coordinator could not
    know; processes that never were are left out."""
    write_summary(run_dir, {**known, "restarts": dict(sorted(restarts.items()))})


def as_status(summary: Mapping[str, Any], run_dir: Path) -> pb.GetJobStatusResponse:
    """What the coordinator would say of a run that has ended, as far as its summary knows."""
    policy = summary.get("policy") or {}
    steps = summary.get("global_step") or 0
    done = summary.get("phase") == "done"
    status = pb.GetJobStatusResponse(
        phase=summary.get("phase") or "",
        policy=policy.get("policy") or 0,
        settings=policy.get("words") or "",
        # Earlier versions did not write it.
        total_steps=summary.get("total_steps") or (steps if done else 0),
        loss=math.nan,
        newest_checkpoint=summary.get("checkpoint") or "",
        checkpoint_age_s=-1,
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
            # JSON knows no NaN.
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
)
"""Fields of a summary and of a status that mean the same. Its rates are means, and do not."""


def show_result(summary: Mapping[str, Any], run_dir: Path) -> None:
    """Prints the figures of a finished run, and the command that takes its model in one line, to be
    copied."""
    console = Console()
    console.print(result_table(summary, run_dir))
    command = export_command(summary, run_dir)
    if command:
        console.print(Text(f"to use the model: {command}"), soft_wrap=True)


def result_table(summary: Mapping[str, Any], run_dir: Path) -> Table:
    """The figures of a finished run, two columns; what the summary lacks is left out."""
    # For those who stop a job that is no failure.
    phase = "stopped" if summary.get("reason") == STOPPED else summary.get("phase", "?")
    title = escape(told(f"{summary.get('job', run_dir.name)}: {phase}"))
    table = Table("", "", title=title)
    table.show_header = False
    table.columns[1].justify = "right"
    # A path is of no use unless it is whole.
    table.columns[1].overflow = "fold"
    for label, value in _rows(summary, run_dir):
        if value is not None:
            table.add_row(escape(told(label)), escape(told(value)))
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
        ("workers", count("workers")),
        ("steps", count("global_step")),
        ("micro-batches", count("batches")),
        ("examples", count("examples")),
        *_counted(summary),
        ("seconds in all", seconds("wall_s")),
        ("seconds in training", seconds("train_s")),
        ("micro-batches per second", number("batches_per_s", "{:.1f}")),
        ("examples per second", number("examples_per_s", "{:.0f}")),
        ("mean staleness", None if replicas else number("mean_staleness", "{:.2f}")),
        # JSON knows no NaN: it is null there.
        *(
            (f"eval.{name}", "not finite" if value is None else f"{value:.4f}")
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
    """Why, of a run that has stopped by itself."""
    reason = summary.get("reason") if summary.get("phase") == "done" else None
    return reason.removeprefix("stopped early ") if reason else None


def _best(summary: Mapping[str, Any]) -> str | None:
    best = summary.get("best")
    if best is None:
        return None
    said = f"{best['epoch']}, in {best['checkpoint']}"
    if best.get("restored", True) or best["checkpoint"] == summary.get("checkpoint"):
        return said
    value = best.get(best.get("by", ""))
    result = f" ({best['by']} {value:.4g})" if isinstance(value, int | float) else ""
    step = best.get("global_step")
    # Of a run that an earlier version began.
    takes = "" if step is None else f"; coordinator export takes it with --step {step}"
    return f"{said}{result}{takes}"


def export_command(summary: Mapping[str, Any], run_dir: Path) -> str:
    """Makes a file of what a run has trained; empty where the job is not done."""
    if summary.get("phase") != "done" or not summary.get("checkpoint"):
        return ""
    into = "--to model.keras"
    if summary.get("growing_tables"):
        # They may be larger than any one machine.
        into = "--tables tables"
    elif summary.get("tables"):
        # A Keras file has no combiner, no padding and no strings.
        into = "--to model/"
    return f"coordinator export {shlex.quote(str(run_dir))} {into}"


def _counted(summary: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """What the shards have applied, by their last checkpoint; nothing where that is not known."""
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
        # Nobody misses what a run that was stopped, or stopped early, has yet to do.
        ("missing", missing if done and not summary.get("reason") else None),
        ("skipped", _named(found["skipped_batches"], found["skipped"])),
    ]


def _named(names: Sequence[str], of_all: int) -> str | None:
    more = [f"{of_all - len(names)} more"] if of_all > len(names) else []
    return ", ".join([*names, *more]) or None


def _evaluated_before(summary: Mapping[str, Any]) -> str | None:
    """At which step, of a run that has gone on since."""
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
