"""``coordinator tune JOB``: runs a study on this machine."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from coordinator.core.wording import figure
from coordinator.dashboard.server import DashboardServer, check_address
from coordinator.dashboard.snapshots import LAST_LOOK_S
from coordinator.launch.commands import UpOptions
from coordinator.launch.conclusion import print_error
from coordinator.launch.options import ANYWHERE, LocalArguments
from coordinator.launch.shared_forks import SharedForks
from coordinator.launch.up import check_local, run_credentials
from coordinator.launch.warm_start import WarmStart
from coordinator.process.describing import DescribeFailed
from coordinator.process.result import export_command
from coordinator.records.tensorboard import EventWriter
from coordinator.search.points import Point, overrides_of
from coordinator.search.trials import StudyMetric, TrialRecord, best_trial
from coordinator.tune.directory import (
    RESULTS,
    StudyDirectory,
    mend_journal,
    new_study_directory,
)
from coordinator.tune.engine import StudyEngine
from coordinator.tune.options import TuneArguments
from coordinator.tune.optuna_study import OptunaStudy
from coordinator.tune.page import PagedScreen, StudyPage
from coordinator.tune.preparation import (
    Preparation,
    gpu_count,
    gpu_of,
    prepare_study,
    trial_overrides,
)
from coordinator.tune.results import write_results
from coordinator.tune.screen import headline, open_study_screen, settings_words
from coordinator.tune.trial_run import TrialRun
from psrpc.core.errors import (
    InvalidArgument,
    JobFailed,
    PsError,
    disk_code,
    disk_reason,
    error_line,
)
from psrpc.files.durable import ensure_directory
from psrpc.files.run_paths import read_summary
from psrpc.ops.exit_status import BAD_INPUT, FAILED, INTERRUPTED
from psrpc.ops.process import on_stop_signals
from psrpc.options.declaration import options_of
from psrpc.options.job_keys import UserCodeFailed
from psrpc.options.security_options import from_arguments, is_insecure
from psrpc.security.credentials import Security
from psrpc.security.identity import Role


def run_study(args: argparse.Namespace, warm_start: WarmStart | None = None) -> int:
    """Runs the study; returns 0 done or out of time, 1 failed, 2 bad input, 130 interrupted.

    Args:
        warm_start: a fork server that is started already; None starts all processes fresh.
    """
    job = args.job
    options = TuneArguments(
        **{each.name: _frozen(getattr(args, each.name)) for each in options_of(TuneArguments)}
    )
    try:
        check_local(options)
        _check(options)
        if args.dashboard not in (None, ANYWHERE):
            check_address(args.dashboard, is_insecure(args))
        asked = from_arguments(Role.OPERATOR, args)
        prepared = prepare_study(options, job, warm_start)
        directory = StudyDirectory(options.run_dir or new_study_directory(Path(job).stem))
        with directory:
            directory.settle(prepared.identity)
            return _run(options, job, prepared, directory, asked, warm_start, args.dashboard)
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


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check(options: TuneArguments) -> None:
    if options.max_failures < 0:
        raise InvalidArgument(
            f"--max-failures is {options.max_failures}; expected a whole number of at least 0"
        )


class _Trials:
    """Makes the runs of a study's trials."""

    def __init__(
        self,
        options: TuneArguments,
        job: str,
        directory: StudyDirectory,
        asked: Security,
        forks: SharedForks,
        note: Callable[[str], object],
        dashboard: str | None,
    ) -> None:
        """``dashboard`` is where the dashboards of the runs are; None for no dashboards."""
        self._options = options
        self._job = job
        self._directory = directory
        self._asked = asked
        self._forks = forks
        self._note = note
        self._dashboard = dashboard
        self._gpus = gpu_count(os.environ)
        self._cores = max(1, (os.cpu_count() or 1) // options.parallel)

    def launch(self, number: int, point: Point, slot: int) -> tuple[TrialRun, Path]:
        """See :data:`coordinator.tune.engine.Launcher`. Raises PsError or OSError."""
        options, run_dir = self._options, self._directory.trial(number)
        if not run_dir.exists():
            ensure_directory(run_dir.absolute())
            with EventWriter(run_dir / "tensorboard") as writer:
                writer.hparams(point)
        said: dict[str, Any] = {
            each.name: getattr(options, each.name) for each in options_of(LocalArguments)
        }
        said["overrides"] = (*trial_overrides(options), *overrides_of(point))
        said["gpu"] = gpu_of(options, slot, self._gpus)
        up = UpOptions(
            self._job,
            **said,
            run_dir=run_dir,
            run_dir_given=True,
            goes_on=True,
            security=run_credentials(self._asked, self._job, run_dir, options.workers),
            dashboard=self._dashboard,
        )
        note = partial(self._warn, number)
        return TrialRun(up, self._forks, self._cores, note), run_dir

    def _warn(self, number: int, line: str) -> None:
        self._note(f"trial {number}: {line}")


def _run(
    options: TuneArguments,
    job: str,
    prepared: Preparation,
    directory: StudyDirectory,
    asked: Security,
    warm_start: WarmStart | None,
    dashboard: str | None,
) -> int:
    mend_journal(directory.journal)
    study = OptunaStudy(directory.journal, prepared.name, prepared.rules)
    limits, metric = prepared.limits, prepared.metric
    page = StudyPage(directory.path, metric, limits, prepared.rules.space)
    screen = PagedScreen(open_study_screen(Console(), metric, limits), page)
    keys = list(prepared.rules.space.ranges)
    shown = ANYWHERE if dashboard is not None else None
    trials = _Trials(options, job, directory, asked, SharedForks(warm_start), screen.note, shown)

    def changed(records: Sequence[TrialRecord]) -> None:
        write_results(directory, records, metric, keys)
        page.show_importance(study.importance())

    engine = StudyEngine(study, limits, metric, trials.launch, screen, changed, options.timeout_s)
    on_stop_signals(lambda _number: engine.stop())
    server = DashboardServer(dashboard, page.site, asked.insecure)
    server.start()
    try:
        screen.note(f"study {directory.path}: {headline(study.records(), metric, limits)}")
        if server.url:
            screen.note(f"dashboard {server.url}")
        page.show(study.records(), ())
        page.show_importance(study.importance())
        status, reason = engine.run()
        page.end(reason, study.records())
        page.subscribers.wait_until_seen(LAST_LOOK_S)
    finally:
        server.stop()
    for line in conclusion(study.records(), metric, directory):
        print(line)  # noqa: T201
    if status == FAILED:
        print_error(error_line(JobFailed(reason)))
    elif status == INTERRUPTED or options.timeout_s is not None:
        print_error(reason)
    return status


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
