"""``worker run | describe | export``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from psrpc.core.errors import InvalidArgument, PsError, error_line
from psrpc.core.policy import MODES
from psrpc.core.version import SOFTWARE
from psrpc.metrics.address import add_metrics_argument, add_trace_argument
from psrpc.ops.process import leave, quiet_grpc, while_read
from psrpc.options import command_line as completion
from psrpc.options.command_line import Parser, run_path
from psrpc.options.config import Configuration
from psrpc.options.security_options import add_security_arguments, from_arguments
from psrpc.security.identity import Role
from worker.process import healthcheck


def main() -> NoReturn:
    """The ``worker`` command. Ends the process with its exit status."""
    leave(while_read(run))


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the command of ``arguments`` (default: the command line); returns the exit status.

    Imports heavy modules only when needed, so that ``--help`` answers at once.
    """
    quiet_grpc()
    options = make_parser().parse_args(arguments)
    if options.command == "describe":
        from worker.describe.describe import describe_main

        return describe_main(options.job, options.set, options.mode)
    if options.command == "export":
        from worker.export.export import export_main

        return export_main(options.job, str(options.checkpoint), options.to, options.set)
    if options.command == "healthcheck":
        return healthcheck.check_worker(options)
    if options.command == "completion":
        sys.stdout.write(completion.script(make_parser(), options.shell) + "\n")
        return 0
    return _run(options)


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    parser = Parser(prog="worker", description="Computes gradients for a training job.")
    parser.add_argument("--version", action="version", version=SOFTWARE)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="take part in a job until it ends")
    run.add_argument(
        "--coordinator",
        default="localhost:5000",
        metavar="HOST[:PORT]",
        help="where the coordinator is (default: %(default)s)",
    )
    run.add_argument(
        "--job",
        metavar="FILE",
        help="this machine's copy of the job file (default: the coordinator's path for it)",
    )
    run.add_argument(
        "--gpu",
        default="auto",
        metavar="auto|none|INDEX",
        help="the GPU to compute on; auto takes the first one there is (default: %(default)s)",
    )
    run.add_argument(
        "--gpu-memory-fraction",
        type=_fraction,
        metavar="F",
        help="take this part of the GPU's memory, between 0 and 1 (default: as it is needed)",
    )
    run.add_argument(
        "--intra-op-threads",
        type=_positive,
        metavar="N",
        help="threads of one TensorFlow operation (default: as the job says)",
    )
    run.add_argument(
        "--connect-timeout",
        type=_seconds,
        default=120.0,
        metavar="S",
        help="give up on a missing coordinator or shard after S seconds (default: 120)",
    )
    run.add_argument(
        "--no-shm",
        dest="shm",
        action="store_false",
        help="send tensors over TCP also to shards on this host (default: share memory with them)",
    )
    run.add_argument(
        "--step-times",
        type=Path,
        metavar="FILE",
        help="at the end, write how long each of the last 100000 steps waited for data, computed, "
        "and exchanged with the shards: a CSV file, in seconds",
    )
    run.add_argument(
        "--slow-down",
        type=_factor,
        default=1.0,
        metavar="F",
        help="a chaos switch: make every step take F times as long to compute, to see what a "
        "straggler does to a job (default: %(default)s)",
    )
    run.add_argument(
        "--log-format",
        choices=("console", "json"),
        default="console",
        help="how to write logs (default: %(default)s)",
    )
    add_metrics_argument(run)
    add_trace_argument(run)
    run.add_argument(
        "--die-with-parent",
        action="store_true",
        help="end at once when the process that started this one ends",
    )
    add_security_arguments(run, listens=False)
    run.set_defaults(configuration=Configuration(run, "worker"))

    describe = commands.add_parser("describe", help="print what a job is, as JSON")
    describe.add_argument("job", metavar="JOB", help="the job file")
    _add_set(describe)
    describe.add_argument("--mode", choices=MODES, help="instead of the job's mode")

    export = commands.add_parser(
        "export", help="write a checkpoint as a file that plain Keras loads"
    )
    export.add_argument("job", metavar="JOB", help="the job file")
    export.add_argument(
        "checkpoint", type=run_path, metavar="CHECKPOINT_DIR", help="directory of a checkpoint"
    )
    export.add_argument(
        "--to",
        required=True,
        metavar="PATH",
        help="MODEL.weights.h5, MODEL.keras, or DIRECTORY/ for a SavedModel",
    )
    _add_set(export)
    healthcheck.add_arguments(
        commands.add_parser("healthcheck", help="say whether a worker answers at its --metrics")
    )
    completion.add_completion(commands, "worker")
    return parser


def _run(options: argparse.Namespace) -> int:
    try:
        completed = options.configuration.complete(options, os.environ)
    except InvalidArgument as error:
        sys.stderr.write(error_line(error) + "\n")
        return 2
    if completed.shown:
        sys.stdout.write(f"{completed.shown}\n")
        return 0
    from psrpc.ops.process import apply_malloc_settings, die_with_parent

    if options.die_with_parent:
        die_with_parent()
    apply_malloc_settings()

    from psrpc.net.channel import COORDINATOR_PORT, check_reachable, format_address, parse_address
    from psrpc.ops.logs import configure

    configure(options.log_format, "worker")
    try:
        host, port = parse_address(options.coordinator, COORDINATOR_PORT)
    except InvalidArgument as error:
        sys.stderr.write(error_line(error, "--coordinator: ") + "\n")
        return 2
    coordinator = format_address(host, port)
    try:
        security = from_arguments(Role.WORKER, options)
        check_reachable(coordinator, security)
    except InvalidArgument as error:
        sys.stderr.write(error_line(error) + "\n")
        return 2

    from worker.process.run import WorkerOptions, run_worker

    try:
        return run_worker(
            WorkerOptions(
                coordinator=coordinator,
                job=options.job,
                gpu=options.gpu,
                gpu_memory_fraction=options.gpu_memory_fraction,
                intra_op_threads=options.intra_op_threads,
                connect_timeout_s=options.connect_timeout,
                shm=options.shm,
                step_times=options.step_times,
                slow_down=options.slow_down,
                metrics=options.metrics,
                trace=options.trace,
                security=security,
            )
        )
    except PsError as error:
        # The worker has not joined a job yet.
        sys.stderr.write(error_line(error) + "\n")
        return 2


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a field of the job, e.g. epochs=3 or optimizer.learning_rate=0.1",
    )


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _factor(text: str) -> float:
    value = _number(text)
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return value


def _fraction(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not more than 0 and at most 1")
    return value


def _number(text: str) -> float:
    """Parses a number; returns -1 for other text, which no option accepts."""
    try:
        return float(text)
    except ValueError:
        return -1.0


if __name__ == "__main__":
    main()
