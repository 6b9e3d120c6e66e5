"""The command line of ``coordinator serve``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from coordinator.dashboard.options import add_dashboard_argument
from psrpc.core.policy import MODES
from psrpc.metrics.address import add_metrics_argument, add_reflection_argument, add_trace_argument
from psrpc.options.command_line import run_path
from psrpc.options.config import Configuration
from psrpc.options.security_options import add_security_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator serve``."""
    parser.add_argument("--job", type=Path, required=True, metavar="FILE", help="the job file")
    parser.add_argument("--shards", type=int, default=1, metavar="K", help="default: 1")
    parser.add_argument(
        "--bind", default="127.0.0.1:5000", metavar="HOST:PORT", help="default: 127.0.0.1:5000"
    )
    parser.add_argument("--run-dir", type=run_path, help="default: runs/<job>-<time>")
    add_override_arguments(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        choices=("always", "auto", "never"),
        const="always",
        default="never",
        metavar="auto",
        help="go on from the newest good checkpoint of --run-dir, or of the job's newest run; "
        "auto, for supervisors: begin, go on or say that all is done, whichever it is",
    )
    add_dashboard_argument(parser)
    parser.add_argument("--log-format", choices=("console", "json"), default="console")
    add_metrics_argument(parser)
    add_trace_argument(parser)
    add_reflection_argument(parser)
    parser.add_argument(
        "--die-with-parent", action="store_true", help="end when the process that started it does"
    )
    add_security_arguments(parser, listens=True)
    parser.set_defaults(configuration=Configuration(parser, "coordinator"))


def run(args: argparse.Namespace) -> int:
    """Serves a job to its end; returns 0 done, 2 for an unusable job, 75 drained, 130 stopped.

    Raises:
        PsError: the job could not be served, or could not go on.
    """
    completed = args.configuration.complete(args, os.environ)
    if completed.shown:
        print(completed.shown)  # noqa: T201
        return 0
    import asyncio

    from coordinator.process.describing import DescribeFailed
    from coordinator.process.options import options_from
    from coordinator.process.serve import serve
    from psrpc.ops.logs import configure
    from psrpc.ops.process import die_with_parent
    from psrpc.ops.tracing import tracing
    from psrpc.options.job_file import UserCodeFailed
    from psrpc.options.job_source import first_look

    if args.die_with_parent:
        die_with_parent()
    configure(args.log_format, "coordinator")
    try:
        with tracing(args.trace, "coordinator"):
            options = options_from(args)
            return asyncio.run(serve(options, lambda: first_look(options.job, options.overrides)))
    except UserCodeFailed as error:
        print(error.user_traceback, end="", file=sys.stderr)  # noqa: T201
        raise
    except DescribeFailed as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2


def add_override_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines ``--mode``, ``--replicas`` and ``--set``."""
    parser.add_argument("--mode", choices=MODES, help="overrides the job's mode")
    parser.add_argument(
        "--replicas", type=int, metavar="K", help="sync: micro-batches of one round"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a field of the job; may be repeated",
    )
