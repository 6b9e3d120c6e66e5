"""``coordinator status``: shows a running job, once or repeatedly, as a page or as JSON.

The JSON has the fields of ``GetJobStatusResponse``, described in
``protos/psrpc/v1/coordinator.proto``. Names and meanings stay; fields may be added. For a run that
has ended and whose coordinator is gone, it shows ``summary.json``, in words or in the same fields
as far as the summary has them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.client.absence import check_way, no_answer
from psrpc.core.errors import CoordinatorUnreachable, Preparing
from psrpc.files.run_paths import ending_in_words, is_starting, read_ending
from psrpc.options import locate as whereabouts
from psrpc.options.security_options import who_asks
from psrpc.security.identity import Role

if TYPE_CHECKING:
    from coordinator.client.client import CoordinatorClient
    from psrpc.v1.coordinator_pb2 import GetJobStatusResponse

EVERY_S = 1.0
"""Interval of ``--watch``."""

AWAY_S = 60.0
"""How long ``--watch`` waits for a coordinator that is being restarted."""

CLEAR = "\x1b[H\x1b[J"
"""Clears a terminal."""


LEGEND = """\
what the words mean:
  staleness 0:812 4-7:3  pushes by how many updates had been made since their parameters were
                         pulled, counted on each shard
  version skew           updates by which the shards differ at one moment
  slice, worker          a part of the parameters that a worker hosts (dense=allreduce), and that
                         worker
  size                   of a shard's parameters; of its embedding tables, rows and all that
                         belongs to them
  updates                seconds that a shard has spent in updates
  data .. apply          where a worker's time goes: reading data, computing, waiting for others,
                         shards without their updates, and these
  slowness               a worker's compute time per example, of the median of all
  silent                 no sign of life for 10 s; a worker's batches go to others then. Shown
                         beside the state from 3 s on
  refused, skipped       gradients of another generation or policy; batches without an update,
                         since their gradient was not finite
  failed                 batches whose worker was lost; others did them again
  too stale              batches that were computed again because of max_staleness
  speculative            micro-batches given to an idle worker as well; superseded: that came second
  late, overdue          gradients that count in a later round; rounds beyond round_deadline_s
  sums in N of M rounds  rounds in which a worker with several micro-batches was to push one sum, of
                         all since the coordinator was started
  uncompensated          pushes that delay compensation could not correct
docs/consistency.md says more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator status``."""
    parser.epilog = LEGEND
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Shows what a running job does, and what a run came to that has ended. Ends with 0 where "
        "there was something to show, and with 2 where no coordinator answers."
    )
    whereabouts.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print all that is known as JSON")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="show it every second until the job ends; with --json, one line each time",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the status of a job, or the result of a run that has ended; returns 0, or 130 if
    ``--watch`` was interrupted.

    Raises:
        CoordinatorUnreachable: no coordinator answers, and no run has ended there; names the
            address or the run.
        PsError: an option is invalid, or an answer did not come in time.
    """
    run_dir = whereabouts.find_run(args)
    if args.watch and run_dir is not None:
        await_start(run_dir)
    try:
        return _show_running(args, run_dir)
    except CoordinatorUnreachable:
        ending = read_ending(run_dir) if run_dir is not None else {}
        if run_dir is None or not ending:
            raise
    _show_ended(run_dir, ending, args.json)
    return 0


def await_start(run_dir: Path, pause: Callable[[float], None] = time.sleep) -> None:
    """Waits while a run is being started: until its coordinator serves, or the start has failed."""
    if is_starting(run_dir):
        _say(f"waiting for the coordinator of {run_dir}, which is being started")
    while is_starting(run_dir):
        pause(EVERY_S)


def _show_running(args: argparse.Namespace, run_dir: Path | None) -> int:
    from coordinator.client.client import CoordinatorClient
    from coordinator.client.patience import Patience

    address = whereabouts.find_coordinator(args)
    role = who_asks(args, (Role.OPERATOR, Role.READER))
    with CoordinatorClient(address, whereabouts.find_security(args, role)) as client:
        check_way(client, run_dir)
        try:
            status = client.get_job_status()
        except CoordinatorUnreachable:
            raise no_answer(client, run_dir=run_dir) from None
        except Preparing:
            if not args.watch:
                raise
            status = Patience(client, AWAY_S, _say).persist(client.get_job_status)
        if not args.watch:
            print(_written(status, as_json=args.json, indent=1))  # noqa: T201
            return 0
        try:
            watch(client, status, as_json=args.json)
        except KeyboardInterrupt:
            return 130
    return 0


def watch(
    client: CoordinatorClient,
    status: GetJobStatusResponse,
    as_json: bool,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Shows ``status`` and the statuses after it, until the job ends.

    Raises:
        CoordinatorUnreachable: the coordinator has not answered for a minute.
    """
    from coordinator.client.patience import Patience
    from coordinator.core.lifecycle import OVER

    patience = Patience(client, AWAY_S, _say)
    clear = CLEAR if sys.stdout.isatty() and not as_json else ""
    while True:
        print(f"{clear}{_written(status, as_json)}", flush=True)  # noqa: T201
        if not as_json and not clear:
            print(flush=True)  # noqa: T201
        if status.phase in OVER:
            return
        pause(EVERY_S)
        status = patience.persist(client.get_job_status)


def _show_ended(run_dir: Path, ending: dict[str, Any], as_json: bool) -> None:
    """Prints the figures of a run that has ended."""
    from coordinator.process.result import as_status, show_result

    if as_json:
        print(_written(as_status(ending, run_dir), as_json, indent=1))  # noqa: T201
        return
    print(f"{run_dir} is not running: the run has ended ({ending_in_words(ending)})")  # noqa: T201
    show_result(ending, run_dir)


def _written(status: GetJobStatusResponse, as_json: bool, indent: int | None = None) -> str:
    from coordinator.display import status_page

    if not as_json:
        return status_page.render_page(status)
    return json.dumps(status_page.status_as_json(status), indent=indent)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201
