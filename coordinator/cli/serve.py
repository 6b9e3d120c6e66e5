"""The command line of ``coordinator serve``."""

from __future__ import annotations

import argparse
import os
import sys

from psrpc.options.config import Configuration
from psrpc.options.settings import CoordinatorOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator serve``."""
    parser.set_defaults(configuration=Configuration(parser, "coordinator", CoordinatorOptions))


def run(args: argparse.Namespace) -> int:
    """Serves a job to its end; returns 0 done, 2 for an unusable job, 75 drained, 130 stopped.

    Raises:
        PsError: the job could not be served, or could not go on.
    """
    configuration: Configuration[CoordinatorOptions] = args.configuration
    if args.show_config:
        print(configuration.shown(args, os.environ))  # noqa: T201
        return 0
    said = configuration.options(args, os.environ)
    import asyncio

    from coordinator.process.describing import DescribeFailed
    from coordinator.process.options import options_from
    from coordinator.process.serve import serve
    from psrpc.ops.logs import configure
    from psrpc.ops.process import die_with_parent
    from psrpc.ops.tracing import tracing
    from psrpc.options.job_keys import UserCodeFailed
    from psrpc.options.job_source import first_look

    if said.die_with_parent:
        die_with_parent()
    configure(said.log_format, "coordinator")
    try:
        with tracing(said.trace, "coordinator"):
            options = options_from(said)
            return asyncio.run(serve(options, lambda: first_look(options.job, options.overrides)))
    except UserCodeFailed as error:
        print(error.user_traceback, end="", file=sys.stderr)  # noqa: T201
        raise
    except DescribeFailed as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
