"""``--help`` and ``--version`` answer at once: they import nothing that takes long."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import coordinator.cli.__main__
import pserver.cli.__main__
import worker.cli.__main__
from psrpc import SOFTWARE

ROOT = Path(__file__).resolve().parent.parent

HEAVY = {"asyncio", "grpc", "keras", "numpy", "opentelemetry", "prometheus_client", "rich",
         "shtab", "sqlite3", "structlog", "tensorflow"}  # fmt: skip
"""They take less than 300 ms because these are not there."""


def commands(parser: argparse.ArgumentParser, said: list[str]) -> Iterator[list[str]]:
    """Every command there is, itself and those below it."""
    yield said
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from commands(below, [*said, name])


ALL = {
    "coordinator": list(commands(coordinator.cli.__main__.make_parser(), [])),
    "pserver": list(commands(pserver.cli.__main__.make_parser(), [])),
    "worker": list(commands(worker.cli.__main__.make_parser(), [])),
}


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize("program", ALL)
def test_help_imports_nothing_heavy(program: str) -> None:
    """One process for all commands of a program: what one of them imports, it has imported."""
    script = (
        "import sys\n"
        f"from {program}.cli.__main__ import {'main' if program == 'coordinator' else 'run'}"
        " as run\n"
        f"for said in [['--version'], *([*said, '--help'] for said in {ALL[program]!r})]:\n"
        "    try: run(said)\n"
        "    except SystemExit as ended: assert ended.code == 0, said\n"
        f"    heavy = {HEAVY!r} & set(sys.modules)\n"
        "    assert not heavy, (said, heavy)\n"
    )
    ran = subprocess.run(
        (sys.executable, "-c", script),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"{SOFTWARE}\nusage:")
    assert ran.stdout.count("usage:") == len(ALL[program])
