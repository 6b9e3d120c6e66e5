"""``worker run | describe | export``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from psrpc import SOFTWARE
from psrpc.core.errors import InvalidArgument, InvalidJob, PsError, error_line
from psrpc.core.policy import MODES
from psrpc.ops.process import leave, quiet_grpc, while_read
from psrpc.options import command_line as completion
from psrpc.options.command_line import Parser
from psrpc.options.config import Configuration
from psrpc.options.declaration import run_path
from psrpc.options.healthcheck import BAD_INPUT, add_timeout, said
from psrpc.options.security_options import add_security_arguments, from_arguments
from psrpc.options.settings import WorkerOptions
from psrpc.security.identity import Role

_MOST_BYTES = 1024
"""Most bytes of an answer that the health check reads."""


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

        return describe_main(options.job, options.set, options.mode, options.output)
    if options.command == "export":
        from worker.export.export import export_main

        return export_main(options.job, str(options.checkpoint), options.to, options.set)
    if options.command == "healthcheck":
        return _check_health(options)
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
    run.set_defaults(configuration=Configuration(run, "worker", WorkerOptions))

    describe = commands.add_parser("describe", help="print what a job is, as JSON")
    describe.add_argument("job", metavar="JOB", help="the job file")
    _add_set(describe)
    describe.add_argument("--mode", choices=MODES, help="instead of the job's mode")
    describe.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write it there, for `coordinator serve --description FILE` where TensorFlow is not "
        "installed, with the same --set and --mode",
    )

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
    health = commands.add_parser(
        "healthcheck", help="say whether a worker answers at its --metrics"
    )
    health.add_argument(
        "address",
        metavar="HOST:PORT",
        help="where its metrics are: its --metrics as it was told, with a fixed port",
    )
    add_timeout(health)
    add_security_arguments(health, listens=False)
    completion.add_arguments(
        commands.add_parser("completion", help=completion.COMPLETION_HELP), "worker"
    )
    return parser


def _run(arguments: argparse.Namespace) -> int:
    configuration: Configuration[WorkerOptions] = arguments.configuration
    try:
        if arguments.show_config:
            sys.stdout.write(configuration.shown(arguments, os.environ) + "\n")
            return 0
        options = configuration.options(arguments, os.environ)
    except InvalidArgument as error:
        sys.stderr.write(error_line(error) + "\n")
        return BAD_INPUT
    from psrpc.ops.process import apply_malloc_settings, die_with_parent

    if options.die_with_parent:
        die_with_parent()
    apply_malloc_settings()

    from psrpc.net.channel import COORDINATOR_PORT, check_reachable, format_address, parse_address
    from psrpc.ops.extras import check_tensorflow
    from psrpc.ops.logs import configure

    configure(options.log_format, "worker")
    try:
        host, port = parse_address(options.coordinator, COORDINATOR_PORT)
    except InvalidArgument as error:
        sys.stderr.write(error_line(error, "--coordinator: ") + "\n")
        return BAD_INPUT
    coordinator = format_address(host, port)
    try:
        check_tensorflow("a worker")
        security = from_arguments(Role.WORKER, options)
        check_reachable(coordinator, security)
    except (InvalidArgument, InvalidJob) as error:
        sys.stderr.write(error_line(error) + "\n")
        return BAD_INPUT

    from worker.process.run import WorkerConfig, run_worker

    try:
        return run_worker(
            WorkerConfig(**{**vars(options), "coordinator": coordinator}, security=security)
        )
    except PsError as error:
        # The worker has not joined a job yet.
        sys.stderr.write(error_line(error) + "\n")
        return BAD_INPUT


def _check_health(args: argparse.Namespace) -> int:
    """Returns 0 if the worker answers, 1 if it does not, 2 if the arguments are invalid."""
    import http.client
    import urllib.request

    from psrpc.metrics.http_head import HEALTH
    from psrpc.net.channel import format_address, is_loopback, parse_address
    from psrpc.security.https import reader_context

    try:
        host, port = parse_address(args.address)
        where = format_address(host, port)
        # Bypass web proxies that the environment names.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        scheme = "http"
        # The worker decides by the same address whether to encrypt.
        if not is_loopback(host):
            security = from_arguments(Role.WORKER, args)
            if security.encrypted and not security.by_token:
                scheme = "https"
                handlers.append(urllib.request.HTTPSHandler(context=reader_context(security)))
    except InvalidArgument as error:
        sys.stderr.write(error_line(error) + "\n")
        return BAD_INPUT
    ask = urllib.request.build_opener(*handlers)
    try:
        with ask.open(f"{scheme}://{where}{HEALTH}", timeout=args.timeout) as answer:
            worker = answer.read(_MOST_BYTES).strip() == Role.WORKER.encode()
    except (OSError, http.client.HTTPException) as error:
        return said(f"{where}: {getattr(error, 'reason', error)}")
    return said("" if worker else f"{where} answers, and is no worker")


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a field of the job, e.g. epochs=3 or optimizer.learning_rate=0.1",
    )


if __name__ == "__main__":
    main()
