"""The command line of ``coordinator up``."""

from __future__ import annotations

import argparse

from coordinator.dashboard.options import add_dashboard_arguments
from coordinator.launch.restarts import MAX_RESTARTS
from psrpc.core.policy import MODES
from psrpc.metrics.address import OFF, TRACE_HELP
from psrpc.options.converters import run_path
from psrpc.options.security_options import add_security_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator up``."""
    parser.add_argument("job", metavar="JOB", help="the job file")
    parser.add_argument("--shards", type=int, default=1, metavar="K", help="default: 1")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--run-dir", type=run_path, help="default: runs/<job>-<time>")
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
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint of --run-dir, or of the job's newest run",
    )
    parser.add_argument(
        "--gpu", default="auto", metavar="auto|none|INDEX", help="for the workers; default: auto"
    )
    parser.add_argument("--gpu-memory-fraction", type=float, metavar="F", help="for the workers")
    parser.add_argument(
        "--intra-op-threads",
        type=int,
        metavar="N",
        help="threads of one operation in a worker; default: the job's own number, else an even "
        "share of the cores",
    )
    parser.add_argument(
        "--connect-timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long processes look for each other; default: 120",
    )
    parser.add_argument(
        "--no-shm",
        dest="shm",
        action="store_false",
        help="workers send tensors over TCP; default: they share memory with the shards",
    )
    parser.add_argument(
        "--data-connections",
        choices=("0", OFF),
        default="0",
        help="off: such tensors go with the calls, not over connections of their own",
    )
    parser.add_argument(
        "--step-times",
        action="store_true",
        help="at the end, each worker writes to RUN_DIR/steps how long each of its last 100000 "
        "steps waited for data, computed, and exchanged with the shards",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=MAX_RESTARTS,
        metavar="N",
        help="start processes that die or hang again, N times in all; 0: never; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--slow-down",
        type=float,
        default=1.0,
        metavar="F",
        help="a chaos switch: the last worker takes F times as long to compute, to see what a "
        "straggler does to the job; default: 1",
    )
    add_dashboard_arguments(parser)
    parser.add_argument(
        "--log-format",
        choices=("console", "json"),
        default="console",
        help="of the processes' logs in RUN_DIR/logs; default: console",
    )
    parser.add_argument("--trace", default="", metavar="URL", help=TRACE_HELP)
    add_security_arguments(parser, listens=True)


def run(args: argparse.Namespace) -> int:
    """Runs the job; returns 0 done, 1 failed, 2 bad input, 130 interrupted."""
    from coordinator.launch import up
    from psrpc.ops.logs import make_printing_safe

    make_printing_safe()
    return up.run(args)
