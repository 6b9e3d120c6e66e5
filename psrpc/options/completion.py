"""The command ``completion``: a script that completes a command line in a shell.

The script is written once and asks nobody when it is used: completing starts no Python.
"""

from __future__ import annotations

import argparse
from typing import Any

SHELLS = ("bash", "zsh", "tcsh")


def add_completion(commands: argparse._SubParsersAction[Any], program: str) -> None:
    """Adds the command to those of ``program``."""
    parser = commands.add_parser("completion", help="print a script for a shell's completion")
    add_arguments(parser, program)


def add_arguments(parser: argparse.ArgumentParser, program: str) -> None:
    """Defines the options of ``completion``."""
    parser.description = (
        "Prints a script that completes this command. bash: put its output into "
        f"~/.local/share/bash-completion/completions/{program}; zsh: into a file _{program} in a "
        "directory of $fpath."
    )
    parser.add_argument("shell", choices=SHELLS)


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for all commands and options of ``parser``."""
    import shtab

    return str(shtab.complete(parser, shell=shell))
