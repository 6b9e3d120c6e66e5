"""The process of a trial that an engine has started on a machine of its own.

The process runs the trial as this machine's `LocalTrial`. It speaks with the command of the study
through files of the run directory, which every engine has: `Request` comes in, `Answer` goes out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from coordinator.search.points import Point
from coordinator.tune.directory import StudyDirectory
from coordinator.tune.options import TuneArguments, tune_arguments
from psrpc.core.errors import PsError, error_line
from psrpc.files.run_paths import is_running
from psrpc.files.storage import replace_text
from psrpc.ops.exit_status import BAD_INPUT, DONE, INTERRUPTED
from psrpc.ops.process import die_with_parent, module_command, on_stop_signals, quiet_grpc

REQUEST, ANSWER = "trial.request", "trial.answer"
"""Files of a run directory. A launch id in each tells those of an earlier start apart."""

POLL_S = 0.2
"""Longest delay before a trial notices a request."""

HANDOVER_S = 120.0
"""How long a trial waits for its coordinator of before to end, on a machine that was lost."""

Wish = Literal["stop", "end early"]


@dataclass(frozen=True)
class TrialStart:
    """The trial that a process has to run.

    Attributes:
        study: the directory of the study, absolute.
        launch: the id of this start of the trial; an engine's retries have the same.
        cores: how many its workers share.
    """

    study: str
    number: int
    point: Point
    launch: str
    cores: int

    @property
    def run_dir(self) -> Path:
        """The run directory of the trial."""
        return StudyDirectory(Path(self.study)).trial(self.number)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Returns the command line; ``arguments`` are those of ``coordinator tune``."""
        return module_command(
            "coordinator.studies.trial_process", json.dumps(asdict(self)), *arguments
        )


def write_wish(run_dir: Path, launch: str, wish: Wish) -> None:
    """Asks the process of a trial to end. Raises OSError."""
    replace_text(run_dir / REQUEST, json.dumps({"launch": launch, "wish": wish}))


def read_wish(run_dir: Path, launch: str) -> str:
    """Returns the `Wish` of the study for this start of a trial; empty without one."""
    return str(_read(run_dir / REQUEST, launch).get("wish", ""))


def trial_answer(run_dir: Path, launch: str) -> tuple[int, str] | None:
    """Returns exit status and reason of a trial that has ended; None before."""
    found = _read(run_dir / ANSWER, launch)
    return (int(found["status"]), str(found["reason"])) if found else None


def _read(path: Path, launch: str) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.get("launch") == launch else {}


def main(argv: Sequence[str]) -> int:
    """Runs a trial to its end; returns 0 if the answer is written, 130 if a signal stopped it."""
    quiet_grpc()
    die_with_parent()
    # Workers of Ray block SIGINT. Children inherit that, and coordinators have to hear it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    start = TrialStart(**json.loads(argv[0]))
    args, options = tune_arguments(argv[1:])
    try:
        return _run(start, args, options)
    except PsError as error:
        print(error_line(error), file=sys.stderr)  # noqa: T201
        _answer(start, BAD_INPUT, str(error))
        return DONE


def _run(start: TrialStart, args: argparse.Namespace, options: TuneArguments) -> int:
    from coordinator.launch.commands import cluster_environment
    from coordinator.launch.shared_forks import SharedForks
    from coordinator.launch.warm_start import WarmStart
    from coordinator.tune.trial_run import LocalTrials
    from psrpc.options.security_options import from_arguments
    from psrpc.security.identity import Role

    directory, run_dir = StudyDirectory(Path(start.study)), start.run_dir
    asked = from_arguments(Role.OPERATOR, args)
    with ExitStack() as held:
        warm_start = None
        if options.warm_start:
            warm_start = held.enter_context(WarmStart(cluster_environment(os.environ)))
        _await_handover(run_dir)
        trials = LocalTrials(
            options, args.job, directory, asked, SharedForks(warm_start), _say, start.cores, 0
        )
        run, _ = trials.launch(start.number, start.point, 0)
        on_stop_signals(lambda _number: run.stop())
        run.start()
        heard = ""
        while (end := run.look()) is None:
            wish = read_wish(run_dir, start.launch)
            if wish and wish != heard:
                heard = wish
                if wish == "stop":
                    run.stop()
                else:
                    run.end_early()
            time.sleep(POLL_S)
    if end.status == INTERRUPTED and not heard:
        # A signal of the machine, not of the study: the engine starts the trial again.
        return INTERRUPTED
    _answer(start, end.status, end.reason)
    return DONE


def _await_handover(run_dir: Path) -> None:
    """Waits for the end of a coordinator that an engine has given up, and that still runs."""
    until = time.monotonic() + HANDOVER_S
    said = False
    while is_running(run_dir) and time.monotonic() < until:
        if not said:
            _say(f"waiting for the earlier coordinator of {run_dir} to end")
            said = True
        time.sleep(POLL_S)


def _answer(start: TrialStart, status: int, reason: str) -> None:
    answer = {"launch": start.launch, "status": status, "reason": reason}
    replace_text(start.run_dir / ANSWER, json.dumps(answer) + "\n")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
