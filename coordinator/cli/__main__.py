"""The command ``coordinator``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from psrpc import SOFTWARE
from psrpc.core.errors import JobFailed, PsError, error_line
from psrpc.ops.process import quiet_grpc, while_read
from psrpc.options import command_line as completion
from psrpc.options.command_line import Parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator completion``."""
    completion.add_arguments(parser, "coordinator")


def run(args: argparse.Namespace) -> int:
    """Prints the completion script; returns 0."""
    print(completion.script(make_parser(), args.shell))  # noqa: T201
    return 0


COMMANDS = {
    "serve": ("coordinator.cli.serve", "serve one job until it is done"),
    "up": ("coordinator.cli.up", "run a job with shards and workers on this machine"),
    "tune": (
        "coordinator.studies.cli",
        "search good settings of a job: many runs, here or on a cluster",
    ),
    "launch": (
        "coordinator.launchers.cli",
        "run a job on a cluster of Slurm, MPI, Kubernetes or Ray",
    ),
    "status": ("coordinator.cli.status", "show what a running job does"),
    "dashboard": ("coordinator.cli.dashboard", "show a job that runs elsewhere to browsers here"),
    "doctor": ("coordinator.doctor.cli", "say why a coordinator cannot be reached, and what to do"),
    "logs": ("coordinator.cli.logs", "show what all processes of a run said, by time"),
    "env": ("coordinator.cli.env", "show what a bug report needs: versions, packages, devices"),
    "set": ("coordinator.cli.set", "change the consistency policy of a running job"),
    "certs": ("coordinator.cli.certs", "make, renew, revoke and show the job's certificates"),
    "audit": ("coordinator.cli.audit", "show what was changed in a run, and by whom"),
    "revoke": ("coordinator.cli.revoke", "end a worker's part in a running job"),
    "export": ("coordinator.cli.export", "turn a run's checkpoint into Keras files"),
    "checkpoint": ("coordinator.cli.checkpoint_options", "look after a run's checkpoints"),
    "healthcheck": ("coordinator.cli.healthcheck", "say whether a coordinator serves"),
    "completion": ("coordinator.cli.__main__", completion.COMPLETION_HELP),
}
"""Each command: its module, which has ``add_arguments(parser)`` and ``run(args)``, and its help.

The modules import what takes long (grpc, numpy) in ``run``, so that ``--help`` answers at once.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0 done, 1 failed, 2 bad input, 130 stopped."""
    quiet_grpc()
    return while_read(lambda: _run(sys.argv[1:] if argv is None else list(argv)))


def _run(arguments: Sequence[str]) -> int:
    # Options of the other commands are not loaded, for a fast --help.
    asked = next((a for a in arguments if not a.startswith("-")), "")
    args = make_parser([asked]).parse_args(arguments)
    try:
        return int(_module(args.command).run(args))
    except PsError as error:
        print(error_line(error), file=sys.stderr)  # noqa: T201
        return 1 if isinstance(error, JobFailed) else 2


def make_parser(asked: Sequence[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Returns the parser; only the commands in ``asked`` have their options."""
    parser = Parser(
        prog="coordinator", description="Hands out the work of a training job and keeps its books."
    )
    parser.add_argument("--version", action="version", version=SOFTWARE)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in asked:
            _module(name).add_arguments(command)
    return parser


def _module(command: str) -> Any:
    return import_module(COMMANDS[command][0])


if __name__ == "__main__":
    sys.exit(main())
