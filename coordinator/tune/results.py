"""The results of a study as files: ``study.csv`` and ``best.json``."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator.process.result import export_command
from coordinator.search.points import overrides_of
from coordinator.search.trials import StudyMetric, TrialRecord, best_trial
from coordinator.tune.directory import BEST, PLACE, RESULTS, StudyDirectory
from coordinator.tune.trial_run import TrialHistory
from psrpc.files.run_paths import read_summary
from psrpc.files.storage import replace_text


def study_table(
    records: Sequence[TrialRecord],
    metric: StudyMetric,
    keys: Sequence[str],
    trained: Mapping[int, int],
) -> str:
    """Formats trials as CSV, a line each: number, state, the metric's last value, epochs, seconds,
    the settings ``keys`` and why it failed or was pruned.

    Args:
        trained: epochs that a trial has trained, by number: a run goes on until it hears that it is
            pruned.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["trial", "state", metric.name, "epochs", "seconds", *keys, "reason"])
    for each in records:
        value = each.values[-1].value if each.values and each.value is None else each.value
        writer.writerow(
            [
                each.number,
                each.phase,
                "" if value is None else value,
                trained.get(each.number, 0),
                "" if each.seconds is None else f"{each.seconds:.1f}",
                *(each.point.get(key, "") for key in keys),
                each.reason,
            ]
        )
    return out.getvalue()


def write_results(
    directory: StudyDirectory,
    records: Sequence[TrialRecord],
    metric: StudyMetric,
    keys: Sequence[str],
) -> None:
    """Writes both files. Raises OSError."""
    trained = {each.number: _epochs(directory.trial(each.number), each, metric) for each in records}
    replace_text(directory.path / RESULTS, study_table(records, metric, keys, trained))
    best = best_trial(records, metric)
    if best is None:
        return
    document = {
        "trial": best.number,
        "metric": str(metric),
        "value": best.value,
        "settings": best.point,
        "set": list(overrides_of(best.point)),
        "run_dir": str(directory.trial(best.number)),
        "export": export_words(directory, best.number),
    }
    replace_text(directory.path / BEST, json.dumps(document, indent=1) + "\n")


def export_words(directory: StudyDirectory, number: int) -> str:
    """Returns the command that exports the model of a trial, with the claim of Kubernetes that has
    the model; empty without a model."""
    run_dir = directory.trial(number)
    summary = read_summary(run_dir)
    try:
        place = json.loads((directory.path / PLACE).read_text())
    except (OSError, ValueError):
        return export_command(summary, run_dir)
    command = export_command(summary, Path(place["runs"], run_dir.name))
    return f"in a pod with the claim {place['volume']}: {command}" if command else ""


def _epochs(run_dir: Path, record: TrialRecord, metric: StudyMetric) -> int:
    evaluated = [*record.values, *TrialHistory(run_dir, metric.name).values()]
    return max((each.epoch for each in evaluated), default=0)
