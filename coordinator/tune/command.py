"""``coordinator tune JOB``: runs a study on this machine."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from coordinator.core.wording import figure
from coordinator.launch.conclusion import print_error
from coordinator.launch.shared_forks import SharedForks
from coordinator.launch.up import check_local
from coordinator.launch.warm_start import WarmStart
from coordinator.process.describing import DescribeFailed
from coordinator.process.result import export_command
from coordinator.search.trials import StudyMetric
from coordinator.tune.directory import (
    RESULTS,
    StudyDirectory,
    mend_journal,
    new_study_directory,
)
from coordinator.tune.engine import Launcher, StudyEngine, StudyScreen
from coordinator.tune.options import TuneArguments
from coordinator.tune.optuna_study import OptunaStudy, TrialRecord
from coordinator.tune.preparation import (
    Preparation,
    gpu_count,
    prepare_study,
)
from coordinator.tune.results import best_trial, write_results
from coordinator.tune.screen import headline, open_study_screen, settings_words
from coordinator.tune.trial_process import frozen_arguments
from coordinator.tune.trial_run import LocalTrials
from psrpc.core.errors import (
    InvalidArgument,
    JobFailed,
    PsError,
    disk_code,
    disk_reason,
    error_line,
)
from psrpc.files.run_paths import read_summary
from psrpc.ops.exit_status import BAD_INPUT, FAILED, INTERRUPTED
from psrpc.ops.process import on_stop_signals
from psrpc.options.job_keys import UserCodeFailed
from psrpc.options.security_options import from_arguments
from psrpc.security.credentials import Security
from psrpc.security.identity import Role


def run_study(args: argparse.Namespace, warm_start: WarmStart | None = None) -> int:
    """Runs the study; returns 0 done or out of time, 1 failed, 2 bad input, 130 interrupted.

    Args:
        warm_start: a fork server that is started already; None starts all processes fresh.
    """
    job = args.job
    options = frozen_arguments(args)
    try:
        check_study(options)
        asked = from_arguments(Role.OPERATOR, args)
        prepared = prepare_study(options, job, warm_start)
        directory = StudyDirectory(options.run_dir or new_study_directory(Path(job).stem))
        with directory:
            directory.settle(prepared.identity)
            return _run(options, job, prepared, directory, asked, warm_start)
    except KeyboardInterrupt:
        print_error("stopped; no trial was started")
        return INTERRUPTED
    except DescribeFailed as error:
        print_error(str(error))
        return BAD_INPUT
    except PsError as error:
        if isinstance(error, UserCodeFailed):
            print_error(error.user_traceback.rstrip())
        print_error(error_line(error))
        return BAD_INPUT
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print_error(error_line(PsError(f"{where}{disk_reason(error)}", code=disk_code(error))))
        return FAILED


def check_study(options: TuneArguments) -> None:
    """Checks what needs no job. Raises InvalidArgument."""
    check_local(options)
    if options.max_failures < 0:
        raise InvalidArgument(
            f"--max-failures is {options.max_failures}; expected a whole number of at least 0"
        )


def _run(
    options: TuneArguments,
    job: str,
    prepared: Preparation,
    directory: StudyDirectory,
    asked: Security,
    warm_start: WarmStart | None,
) -> int:
    def engine_of(screen: StudyScreen) -> StudyEngine:
        forks, gpus = SharedForks(warm_start), gpu_count(os.environ)
        cores = max(1, (os.cpu_count() or 1) // options.parallel)
        trials = LocalTrials(options, job, directory, asked, forks, screen.note, cores, gpus)
        return study_engine(options, prepared, directory, trials.launch, screen)

    status, reason = run_trials(
        prepared, directory, engine_of, lambda engine: on_stop_signals(lambda _n: engine.stop())
    )
    if status == FAILED:
        print_error(error_line(JobFailed(reason)))
    elif status == INTERRUPTED or options.timeout_s is not None:
        print_error(reason)
    return status


def study_engine(
    options: TuneArguments,
    prepared: Preparation,
    directory: StudyDirectory,
    launcher: Launcher,
    screen: StudyScreen,
) -> StudyEngine:
    """Opens the study of a directory that this process holds. Raises OSError."""
    mend_journal(directory.journal)
    study = OptunaStudy(directory.journal, prepared.name, prepared.rules)
    limits, metric = prepared.limits, prepared.metric
    keys = list(prepared.rules.space.ranges)

    def changed(records: Sequence[TrialRecord]) -> None:
        write_results(directory, records, metric, keys)

    screen.note(f"study {directory.path}: {headline(study.records(), metric, limits)}")
    return StudyEngine(study, limits, metric, launcher, screen, changed, options.timeout_s)


def run_trials(
    prepared: Preparation,
    directory: StudyDirectory,
    engine_of: Callable[[StudyScreen], StudyEngine],
    hear: Callable[[StudyEngine], object],
) -> tuple[int, str]:
    """Runs a study and prints its results; returns exit status and reason.

    Args:
        hear: takes stop signals for the engine from now on.
    """
    screen = open_study_screen(Console(), prepared.metric, prepared.limits)
    engine = engine_of(screen)
    hear(engine)
    status, reason = engine.run()
    for line in conclusion(engine.records(), prepared.metric, directory):
        print(line)  # noqa: T201
    return status, reason


def conclusion(
    records: Sequence[TrialRecord], metric: StudyMetric, directory: StudyDirectory
) -> list[str]:
    """Returns the lines to print at the end of a study: its results, best trial and journal."""
    path = directory.path
    lines = [f"results {path / RESULTS}"]
    best = best_trial(records, metric)
    if best is not None and best.value is not None:
        run_dir = directory.trial(best.number)
        lines += [
            f"best {metric.name} {figure(best.value)} in trial {best.number}: "
            f"{settings_words(best.point)}",
            f"best model  {export_command(read_summary(run_dir), run_dir)}",
        ]
    journal = shlex.quote(str(directory.journal))
    return [*lines, f"in a browser  optuna-dashboard {journal}"]
