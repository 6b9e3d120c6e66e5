"""The command ``coordinator``."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from psrpc.errors import JobFailed, PsError
from psrpc.policy import MODES
from psrpc.version import SOFTWARE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0 done, 1 failed, 2 bad input, 130 stopped."""
    parser = argparse.ArgumentParser(
        prog="coordinator", description="Hands out the work of a training job and keeps its books."
    )
    parser.add_argument("--version", action="version", version=SOFTWARE)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    arguments = sys.argv[1:] if argv is None else list(argv)
    # Help on one command need not import the others.
    asked = next((a for a in arguments if not a.startswith("-")), "")

    serve = commands.add_parser("serve", help="serve one job until it is done")
    if asked == "serve":
        _add_serve_arguments(serve)
    up = commands.add_parser("up", help="run a job with shards and workers on this machine")
    if asked == "up":
        from coordinator import up as up_command

        up_command.add_arguments(up)
    status = commands.add_parser("status", help="show what a running job does")
    if asked == "status":
        from coordinator import status_cli

        status_cli.add_arguments(status)
    change = commands.add_parser("set", help="change the consistency policy of a running job")
    if asked == "set":
        from coordinator import set_cli

        set_cli.add_arguments(change)
    export = commands.add_parser("export", help="turn a run's checkpoint into Keras files")
    if asked == "export":
        from coordinator import export as export_command

        export_command.add_arguments(export)
    checkpoint = commands.add_parser("checkpoint", help="look after a run's checkpoints")
    if asked == "checkpoint":
        from coordinator import checkpoint_cli

        checkpoint_cli.add_arguments(checkpoint)

    args = parser.parse_args(arguments)
    try:
        if args.command == "serve":
            return _serve(args)
        if args.command == "up":
            from psrpc.logs import make_printing_safe

            make_printing_safe()
            return int(up_command.run(args))
        if args.command == "status":
            return int(status_cli.run(args))
        if args.command == "set":
            return int(set_cli.run(args))
        return int((export_command if args.command == "export" else checkpoint_cli).run(args))
    except PsError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1 if isinstance(error, JobFailed) else 2


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", type=Path, required=True, metavar="FILE", help="the job file")
    parser.add_argument("--shards", type=int, default=1, metavar="K", help="default: 1")
    parser.add_argument(
        "--bind", default="127.0.0.1:5000", metavar="HOST:PORT", help="default: 127.0.0.1:5000"
    )
    parser.add_argument("--run-dir", type=Path, help="default: runs/<job>-<time>")
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
        help="go on from the newest good checkpoint of --run-dir, or of the job's newest run",
    )
    parser.add_argument("--log-format", choices=("console", "json"), default="console")
    parser.add_argument(
        "--die-with-parent", action="store_true", help="end when the process that started it does"
    )


def _serve(args: argparse.Namespace) -> int:
    # gRPC's own lines on a port in use would come before ours; it reads this when imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from coordinator.description import DescribeFailed
    from coordinator.serve import options_from, serve
    from psrpc.logs import configure
    from psrpc.process import die_with_parent

    if args.die_with_parent:
        die_with_parent()
    configure(args.log_format, "coordinator")
    try:
        return asyncio.run(serve(options_from(args)))
    except DescribeFailed as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2


if __name__ == "__main__":
    sys.exit(main())
