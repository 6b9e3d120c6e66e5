"""The command ``pserver``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from psrpc import SOFTWARE
from psrpc.core.errors import InvalidArgument, error_line
from psrpc.ops.exit_status import BAD_INPUT, DONE, FAILED
from psrpc.ops.process import (
    apply_malloc_settings,
    die_with_parent,
    leave,
    on_stop_signals,
    quiet_grpc,
    while_read,
)
from psrpc.options import command_line as completion
from psrpc.options import healthcheck
from psrpc.options import locate as whereabouts
from psrpc.options.command_line import Parser
from psrpc.options.config import Configuration
from psrpc.options.security_options import from_arguments, who_asks
from psrpc.options.settings import ShardOptions
from psrpc.security.identity import Role


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser of the command line."""
    parser = Parser(prog="pserver", description="Holds one shard of a training job's parameters.")
    parser.add_argument("--version", action="version", version=SOFTWARE)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="serve a shard until its job ends", description="Serves one shard of a job."
    )
    serve.set_defaults(configuration=Configuration(serve, "pserver", ShardOptions))
    _add_lookup(
        commands.add_parser(
            "lookup",
            help="print rows of an embedding table of a running job",
            description="Prints rows of an embedding table of a running job, as they are now.",
        )
    )
    health = commands.add_parser("healthcheck", help="check whether a shard is alive or serving")
    health.add_argument(
        "address",
        nargs="?",
        default="localhost:5000",
        metavar="HOST:PORT",
        help="where it listens (default: %(default)s)",
    )
    healthcheck.add_arguments(health)
    completion.add_arguments(
        commands.add_parser("completion", help=completion.COMPLETION_HELP), "pserver"
    )
    return parser


def _add_lookup(lookup: argparse.ArgumentParser) -> None:
    add = lookup.add_argument
    add("table", metavar="TABLE", help="name of the table")
    add("ids", metavar="ID", nargs="+", help="ids of rows")
    add("--strings", action="store_true", help="the ids are strings, as the job's data has them")
    add(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long to wait for the cluster to be complete (default: %(default)s)",
    )
    add("--json", action="store_true", help="print one JSON object")
    whereabouts.add_arguments(lookup)


def main() -> NoReturn:
    """Runs the ``pserver`` command and ends the process with its exit status."""
    leave(while_read(run))


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    quiet_grpc()
    arguments = make_parser().parse_args(argv)
    if arguments.command == "lookup":
        from pserver.cli.lookup import run_lookup

        return run_lookup(arguments)
    if arguments.command == "healthcheck":
        return _check_health(arguments)
    if arguments.command == "completion":
        print(completion.script(make_parser(), arguments.shell))  # noqa: T201
        return 0
    configuration: Configuration[ShardOptions] = arguments.configuration
    try:
        if arguments.show_config:
            print(configuration.shown(arguments, os.environ))  # noqa: T201
            return DONE
        return _serve(configuration.options(arguments, os.environ))
    except InvalidArgument as error:
        print(error_line(error), file=sys.stderr)  # noqa: T201
        return BAD_INPUT


def _serve(options: ShardOptions) -> int:
    # The imports below are slow; --help and wrong options do not wait for them.
    apply_malloc_settings()
    if options.die_with_parent:
        die_with_parent()
    from pserver.process.config import ServeConfig
    from pserver.process.ending import Ending
    from pserver.process.shard import serve
    from psrpc.core.errors import (
        AccessDenied,
        AlreadyExists,
        CoordinatorUnreachable,
        InvalidJob,
        JobDone,
        JobFailed,
        JobMismatch,
        PortInUse,
        PsError,
    )
    from psrpc.ops.logs import configure, get_logger
    from psrpc.ops.tracing import tracing

    configure(options.log_format, f"shard {options.shard}")
    ending = Ending()
    on_stop_signals(ending.stop)
    try:
        config = ServeConfig(**vars(options), security=from_arguments(Role.SHARD, options))
        with tracing(options.trace, "shard"):
            serve(config, ending)
    except JobDone as error:
        get_logger().info("nothing is left to do", why=str(error))
        return DONE
    except JobFailed as error:
        print(error_line(error, "job failed: "), file=sys.stderr)  # noqa: T201
        return FAILED
    except CoordinatorUnreachable as error:
        if ending.status != DONE:
            return ending.status
        print(error_line(error), file=sys.stderr)  # noqa: T201
        return FAILED
    except PsError as error:
        print(error_line(error), file=sys.stderr)  # noqa: T201
        # Only these errors would occur again after a restart.
        hopeless = (
            AccessDenied | AlreadyExists | InvalidArgument | InvalidJob | JobMismatch | PortInUse
        )
        return BAD_INPUT if isinstance(error, hopeless) else FAILED
    return ending.status


def _check_health(arguments: argparse.Namespace) -> int:
    try:
        # Any role may check. Inside its container the shard checks itself, with its own
        # certificate.
        security = from_arguments(who_asks(arguments, (Role.SHARD, *Role)), arguments)
        service = "psrpc.v1.ParameterServer"
        return healthcheck.check_health(arguments, arguments.address, security, Role.SHARD, service)
    except InvalidArgument as error:
        print(error_line(error), file=sys.stderr)  # noqa: T201
        return BAD_INPUT


if __name__ == "__main__":
    main()
