"""Parses command lines. Errors have a code and say how to fix them."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

from psrpc.core.errors import InvalidArgument, error_line
from psrpc.options.config_keys import did_you_mean
from psrpc.options.job_keys import setting_meant

SHELLS = ("bash", "zsh", "tcsh")


EXIT_BAD_INPUT = 2

USAGE_LINES = 4
"""Longest usage that is printed before an error: a longer one would hide the error."""

_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """A parser for a command's options and its subcommands."""

    def __init__(self, *args: Any, **more: Any) -> None:
        """Disables abbreviations, because a new option could make an abbreviation ambiguous."""
        super().__init__(*args, **{"allow_abbrev": False, **more})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses unknown arguments itself, because it can suggest known ones."""
        words = sys.argv[1:] if args is None else list(args)
        said, unknown = super().parse_known_args(words, namespace)
        if unknown:
            flag = next((word for word in unknown if word.startswith("-")), "")
            known = [*re.findall(r"--[\w-]+", self.format_usage()), "--help"]
            close = did_you_mean(flag.partition("=")[0], known)
            if flag and "--set" in known:
                setting = setting_meant(words, flag, exactly=bool(close))
                if setting:
                    self.error(f"unrecognized arguments: {flag}; use --set {setting}")
            if not flag and "--resume" in words:
                close = f"; --resume takes no value: --run-dir {unknown[0]} --resume"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{close}")
        return said, unknown

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the error, and exits with 2."""
        choice = _CHOICE.search(message)
        if choice is not None:
            message += did_you_mean(choice[1], re.findall(r"[\w.-]+", choice[2]))
        error = InvalidArgument(f"{self.prog}: {message}", code="PS113")
        usage = self.format_usage()
        if usage.count("\n") > USAGE_LINES:
            usage = f"usage: {self.prog} ...; `{self.prog} --help` lists the options\n"
        self.exit(EXIT_BAD_INPUT, f"{usage}{error_line(error)}\n")


COMPLETION_HELP = "print a script for a shell's completion"


def add_arguments(parser: argparse.ArgumentParser, program: str) -> None:
    """Defines the options of ``completion``."""
    parser.description = (
        "Prints a script that completes this command. bash: put its output into "
        f"~/.local/share/bash-completion/completions/{program}; zsh: into a file _{program} in a "
        "directory of $fpath."
    )
    parser.add_argument("shell", choices=SHELLS)


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Returns the completion script for all commands and options of ``parser``."""
    import shtab

    return str(shtab.complete(parser, shell=shell))
