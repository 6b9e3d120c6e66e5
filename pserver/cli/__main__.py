"""The command ``pserver``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from psrpc.core.errors import InvalidArgument, error_line
from psrpc.core.version import SOFTWARE
from psrpc.metrics.address import add_metrics_argument, add_reflection_argument, add_trace_argument
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
from psrpc.options.command_line import Parser, run_path
from psrpc.options.config import Configuration
from psrpc.options.security_options import add_security_arguments, from_arguments, who_asks
from psrpc.security.identity import Role


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser of the command line."""
    parser = Parser(prog="pserver", description="Holds one shard of a training job's parameters.")
    parser.add_argument("--version", action="version", version=SOFTWARE)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="serve a shard until its job ends", description="Serves one shard of a job."
    )
    add = serve.add_argument
    add("--shard", type=int, required=True, metavar="N", help="index of the shard, from 0")
    add(
        "--coordinator",
        default="localhost:5000",
        metavar="HOST[:PORT]",
        help="where the coordinator is (default: %(default)s)",
    )
    add(
        "--bind",
        default="",
        metavar="HOST:PORT",
        help="address to listen on; port 0 is any, 0.0.0.0 every interface (default: any port; "
        "on 127.0.0.1 if the coordinator is on localhost, else on every interface)",
    )
    add(
        "--advertise",
        metavar="HOST[:PORT]",
        help="address that workers use, where it differs from the one bound",
    )
    add(
        "--run-dir",
        type=run_path,
        metavar="PATH",
        help="where the job's run directory is here, if not where the coordinator has it",
    )
    add(
        "--connect-timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long to go on without the coordinator (default: %(default)s)",
    )
    add(
        "--log-format",
        choices=("console", "json"),
        default="console",
        help="how to write logs (default: %(default)s)",
    )
    add(
        "--data-connections",
        default="0",
        metavar="PORT",
        help="where workers of other machines connect for tensors, beside --bind: 0 is any, off "
        "sends tensors with the calls (default: any)",
    )
    add_metrics_argument(serve)
    add_trace_argument(serve)
    add_reflection_argument(serve)
    add("--die-with-parent", action="store_true", help="end when the starting process ends")
    add_security_arguments(serve, listens=True)
    serve.set_defaults(configuration=Configuration(serve, "pserver"))
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
    completion.add_completion(commands, "pserver")
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
    try:
        completed = arguments.configuration.complete(arguments, os.environ)
    except InvalidArgument as error:
        print(error_line(error), file=sys.stderr)  # noqa: T201
        return BAD_INPUT
    if completed.shown:
        print(completed.shown)  # noqa: T201
        return 0
    # The imports below are slow; --help and wrong options do not wait for them.
    apply_malloc_settings()
    if arguments.die_with_parent:
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

    configure(arguments.log_format, f"shard {arguments.shard}")
    ending = Ending()
    on_stop_signals(ending.stop)
    try:
        config = ServeConfig(
            shard=arguments.shard,
            coordinator=arguments.coordinator,
            bind=arguments.bind,
            advertise=arguments.advertise,
            run_dir=arguments.run_dir,
            connect_timeout_s=arguments.connect_timeout,
            log_format=arguments.log_format,
            metrics=arguments.metrics,
            reflection=arguments.reflection,
            data_connections=arguments.data_connections,
            security=from_arguments(Role.SHARD, arguments),
        )
        with tracing(arguments.trace, "shard"):
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
        # Only these errors would recur at another try.
        hopeless = (
            AccessDenied | AlreadyExists | InvalidArgument | InvalidJob | JobMismatch | PortInUse
        )
        return BAD_INPUT if isinstance(error, hopeless) else FAILED
    return ending.status


def _check_health(arguments: argparse.Namespace) -> int:
    try:
        # Any role may check; in a container the server itself does.
        security = from_arguments(who_asks(arguments, (Role.SHARD, *Role)), arguments)
        service = "psrpc.v1.ParameterServer"
        return healthcheck.check_health(arguments, arguments.address, security, Role.SHARD, service)
    except InvalidArgument as error:
        print(error_line(error), file=sys.stderr)  # noqa: T201
        return BAD_INPUT


if __name__ == "__main__":
    main()
