"""``summary.json``: what a run came to."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

from coordinator.course import Course
from coordinator.gauges import refused
from coordinator.saving import FINAL

NAME = "summary.json"


def summarize(course: Course) -> dict[str, Any]:
    """The figures of a run that has ended. Rates are means over this run's training time and
    count micro-batches; ``eval`` is the final evaluation, empty where there was none."""
    run, training = course.run, course.training
    progress, span = training.progress, training.span
    results = {name: values for name, _, values in training.results}
    train_s = progress.train_s
    return {
        "run_id": run.run_id,
        "job": run.description.name,
        "phase": course.phase,
        "reason": course.reason,
        "mode": run.settings.mode,
        "shards": run.plan.shards,
        "workers": progress.contributors,
        "replicas": run.settings.open,
        "global_step": span.step,
        "batches": span.batches,
        "examples": span.examples,
        "wall_s": round(course.now() - course.began, 3),
        "train_s": round(train_s, 3),
        "steps_per_s": round(progress.batches / train_s, 3) if train_s else 0.0,
        "examples_per_s": round(progress.examples / train_s, 3) if train_s else 0.0,
        "eval": _plain(results.get(FINAL, {})),
        "evaluations": [
            {"evaluation": name, "global_step": step, **_plain(values)}
            for name, step, values in training.results
        ],
        "checkpoint": course.newest_checkpoint,
        "refused": refused(course),
        "skipped": progress.skipped,
        "failed": progress.failed,
        "mean_staleness": round(progress.mean_staleness, 4),
        "generation": run.generation,
        "resume": _resume(course),
        "warnings": training.warnings,
    }


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Writes the file whole: a reader sees the old one or the new one."""
    temporary = run_dir / f".{NAME}.tmp"
    temporary.write_text(json.dumps(summary, indent=2) + "\n")
    temporary.replace(run_dir / NAME)


def _resume(course: Course) -> str:
    """The options that go on with a run that came to no good end; empty where there are none."""
    if course.phase != "failed" or not course.newest_checkpoint:
        return ""
    return shlex.join(["--resume", "--run-dir", str(course.run.run_dir)])


def _plain(values: dict[str, float]) -> dict[str, float | None]:
    """JSON knows no NaN."""
    return {k: v if math.isfinite(v) else None for k, v in values.items()}
