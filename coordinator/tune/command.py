"""``coordinator tune JOB``: runs a study."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from coordinator.core.wording import figure
from coordinator.dashboard.server import DashboardServer, check_address
from coordinator.dashboard.snapshots import LAST_LOOK_S
from coordinator.launch.conclusion import print_error
from coordinator.launch.options import ANYWHERE
from coordinator.launch.shared_forks import SharedForks
from coordinator.launch.up import check_local
from coordinator.launch.warm_start import WarmStart
from coordinator.process.describing import DescribeFailed
from coordinator.search.trials import StudyMetric, TrialRecord, best_trial, read_metric
from coordinator.tune.directory import (
    RESULTS,
    STUDY,
    StudyDirectory,
    mend_journal,
    new_study_directory,
)
from coordinator.tune.engine import Launcher, LauncherOf, StudyEngine, StudyScreen
from coordinator.tune.options import TuneArguments, frozen_arguments
from coordinator.tune.optuna_study import OptunaStudy
from coordinator.tune.page import PagedScreen, StudyPage
from coordinator.tune.preparation import (
    Preparation,
    gpu_count,
    prepare_study,
)
from coordinator.tune.results import export_words, write_results
from coordinator.tune.screen import headline, open_study_screen, settings_words
from coordinator.tune.trial_run import LocalTrials
from psrpc.core.errors import (
    InvalidArgument,
    JobFailed,
    PsError,
    disk_code,
    disk_reason,
    error_line,
)
from psrpc.ops.exit_status import BAD_INPUT, FAILED, INTERRUPTED
from psrpc.ops.process import on_stop_signals
from psrpc.options.job_keys import UserCodeFailed
from psrpc.options.security_options import from_arguments, is_insecure
from psrpc.security.credentials import Security
from psrpc.security.identity import Role

EngineOf = Callable[[str, TuneArguments], AbstractContextManager[LauncherOf]]
"""Opens an engine for the time of a study, whose job file and options it gets."""


def run_study(
    args: argparse.Namespace,
    warm_start: WarmStart | None = None,
    engine_of: EngineOf | None = None,
) -> int:
    """Runs the study; returns 0 done or out of time, 1 failed, 2 bad input, 130 interrupted.

    Args:
        warm_start: a fork server that is started already; None starts all processes fresh.
        engine_of: opens the engine that runs the trials; None for this machine.
    """
    job = args.job
    options = frozen_arguments(args)
    try:
        check_study(options)
        if args.dashboard not in (None, ANYWHERE):
            check_address(args.dashboard, is_insecure(args))
        asked = from_arguments(Role.OPERATOR, args)
        with ExitStack() as held:
            directory = None
            if options.run_dir is not None and (options.run_dir / STUDY).exists():
                # Before the job is read, so that another command hears of this one at once.
                directory = held.enter_context(StudyDirectory(options.run_dir))
            print(reading(job), flush=True)  # noqa: T201
            prepared = prepare_study(options, job, warm_start, elsewhere=engine_of is not None)
            engine = None
            if engine_of is not None:
                if warm_start is not None:
                    # Has served the checks; the trials have servers of their own.
                    warm_start.stop()
                engine = held.enter_context(engine_of(job, options))
            if directory is None:
                path = options.run_dir or new_study_directory(Path(job).stem)
                directory = held.enter_context(StudyDirectory(path))
            directory.settle(prepared.identity)
            study = StudySetting(options, job, prepared, directory, asked, args.dashboard)
            return _run(study, warm_start, engine)
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


def reading(job: str) -> str:
    """Returns the line to show while :func:`prepare_study` works."""
    return f"reading {job}, and again with settings of the search; some seconds each"


def check_study(options: TuneArguments) -> None:
    """Checks what needs no job. Raises InvalidArgument."""
    check_local(options)
    if options.metric:
        read_metric(options.metric)
    if options.max_failures < 0:
        raise InvalidArgument(
            f"--max-failures is {options.max_failures}; expected a whole number of at least 0"
        )


@dataclass(frozen=True)
class StudySetting:
    """A study that is ready to run, in the directory that this process holds.

    Attributes:
        asked: the credentials that the user has named.
        dashboard: HOST:PORT of the study's page; None for no page.
    """

    options: TuneArguments
    job: str
    prepared: Preparation
    directory: StudyDirectory
    asked: Security
    dashboard: str | None


def _run(study: StudySetting, warm_start: WarmStart | None, engine: LauncherOf | None) -> int:
    options, directory = study.options, study.directory

    def launcher_of(note: Callable[[str], object]) -> Launcher:
        if engine is not None:
            return engine(directory, note)
        forks, gpus = SharedForks(warm_start), gpu_count(os.environ)
        cores = max(1, (os.cpu_count() or 1) // options.parallel)
        shown = ANYWHERE if study.dashboard is not None else None
        asked = study.asked
        return LocalTrials(
            options, study.job, directory, asked, forks, note, cores, gpus, shown
        ).launch

    def hear(engine: StudyEngine) -> None:
        on_stop_signals(lambda _number: engine.stop())

    status, reason = run_trials(study, launcher_of, hear)
    if status == FAILED:
        print_error(error_line(JobFailed(reason)))
    elif status == INTERRUPTED or options.timeout_s is not None:
        print_error(reason)
    return status


def run_trials(
    study: StudySetting,
    launcher_of: Callable[[Callable[[str], object]], Launcher],
    hear: Callable[[StudyEngine], object],
) -> tuple[int, str]:
    """Runs a study and prints its results; returns exit status and reason.

    Args:
        launcher_of: makes the launcher of trials; gets what shows a line to the user.
        hear: takes stop signals for the engine from now on.

    Raises:
        PsError: the engine of the trials refuses one.
        OSError: the directory of the study cannot be written.
    """
    prepared, directory = study.prepared, study.directory
    limits, metric = prepared.limits, prepared.metric
    page = StudyPage(directory.path, metric, limits, prepared.rules.space)
    screen = PagedScreen(open_study_screen(Console(), metric, limits), page)
    engine = _engine(study, launcher_of(screen.note), screen, page)
    hear(engine)
    server = DashboardServer(study.dashboard, page.site, study.asked.insecure)
    server.start()
    try:
        if server.url:
            screen.note(f"dashboard {server.url}")
        status, reason = engine.run()
        page.end(reason, engine.records())
        page.subscribers.wait_until_seen(LAST_LOOK_S)
    finally:
        server.stop()
    for line in conclusion(engine.records(), metric, directory):
        print(line)  # noqa: T201
    return status, reason


def _engine(
    study: StudySetting, launcher: Launcher, screen: StudyScreen, page: StudyPage
) -> StudyEngine:
    """Opens the study of a directory that this process holds. Raises OSError."""
    prepared, directory = study.prepared, study.directory
    mend_journal(directory.journal)
    stored = OptunaStudy(directory.journal, prepared.name, prepared.rules)
    limits, metric = prepared.limits, prepared.metric
    keys = list(prepared.rules.space.ranges)

    def changed(records: Sequence[TrialRecord]) -> None:
        write_results(directory, records, metric, keys)
        page.show_importance(stored.importance())

    screen.note(f"study {directory.path}: {headline(stored.records(), metric, limits)}")
    page.show(stored.records(), ())
    page.show_importance(stored.importance())
    timeout_s = study.options.timeout_s
    return StudyEngine(stored, limits, metric, launcher, screen, changed, timeout_s)


def conclusion(
    records: Sequence[TrialRecord], metric: StudyMetric, directory: StudyDirectory
) -> list[str]:
    """Returns the lines to print at the end of a study: its results, best trial and page."""
    path = directory.path
    lines = [f"results {path / RESULTS}"]
    best = best_trial(records, metric)
    if best is not None and best.value is not None:
        lines += [
            f"best {metric.name} {figure(best.value)} in trial {best.number}: "
            f"{settings_words(best.point)}",
            f"best model  {export_words(directory, best.number)}",
        ]
    return [*lines, f"in a browser  coordinator dashboard --run-dir {shlex.quote(str(path))}"]
