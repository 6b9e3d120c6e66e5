"""The command line of ``coordinator completion``."""

from __future__ import annotations

import argparse

from psrpc.options import completion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator completion``."""
    completion.add_arguments(parser, "coordinator")


def run(args: argparse.Namespace) -> int:
    """Prints the script; returns 0."""
    from coordinator.cli.__main__ import make_parser

    print(completion.script(make_parser(), args.shell))  # noqa: T201
    return 0
