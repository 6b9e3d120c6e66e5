"""The page of a study that has ended, from its directory alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from coordinator.dashboard.server import DashboardServer
from coordinator.search.points import read_space
from coordinator.search.trials import StudyLimits, read_metric
from coordinator.studies.study import load_study
from coordinator.tune.directory import STUDY
from coordinator.tune.optuna_study import importance_of, stored_trials
from coordinator.tune.page import StudyPage
from psrpc.core.document import anything, mapped
from psrpc.core.errors import InvalidArgument
from psrpc.files.run_paths import is_running
from psrpc.files.storage import cause_of, read_json
from psrpc.ops.exit_status import INTERRUPTED
from psrpc.ops.process import on_stop_signals


def serve_ended_study(
    path: Path, bind: str, public: bool, announce: Callable[[str], object]
) -> int:
    """Serves the page of the study in ``path`` until a stop signal; returns 130. Trains and writes
    nothing.

    Args:
        bind: HOST:PORT of the page.
        public: whether other machines may view the page.
        announce: prints a line.

    Raises:
        InvalidJob: Optuna is missing.
        InvalidArgument: the study runs now, or its directory or ``bind`` cannot be used.
        PortInUse: another process has the port.
    """
    page, stopped = ended_page(path), threading.Event()
    instead = "or --public if all who reach it may look"
    server = DashboardServer(bind, page.site, public, option="--bind", instead=instead)
    on_stop_signals(lambda _number: stopped.set())
    server.start()
    try:
        announce(f"dashboard {server.url} of the study in {path}, until Ctrl-C")
        stopped.wait()
    finally:
        server.stop()
    return INTERRUPTED


def ended_page(path: Path) -> StudyPage:
    """Returns the page of a study that does not run. Raises as :func:`serve_ended_study` does."""
    if is_running(path):
        raise InvalidArgument(
            f"the study in {path} runs; its command has printed the address of its page"
        )
    try:
        known = mapped(anything)(read_json(path / STUDY), "")
        space, metric = read_space(known["space"]), read_metric(known["metric"])
    except KeyError as error:
        raise InvalidArgument(f"{path / STUDY} cannot be read: it has no {error}") from None
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path / STUDY} cannot be read: {cause_of(error)}") from None
    study = load_study(path)
    records = [
        replace(each, phase="stopped") if each.phase == "running" else each
        for each in stored_trials(study)
    ]
    page = StudyPage(path.absolute(), metric, StudyLimits(len(records), 1, 0), space)
    page.show_importance(importance_of(study, records))
    left = any(each.phase == "stopped" for each in records)
    more = "the command that has begun it goes on with it" if left else "all its trials have ended"
    page.end(more, records)
    return page
