"""A process that forks one child for each scenario, so that what the child does is the same every
time and nothing but the scenario.

Reads ``start SCENARIO DIRECTORY WORDS`` and answers with the child's pid; the child waits for
``go``, which is answered with its exit status. What the child says goes to the file WORDS.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

from tests.faults.scenarios import SCENARIOS


def main() -> None:
    """Serves until its standard input ends."""
    # Everything is imported and compiled once before.
    for scenario in SCENARIOS.values():
        with tempfile.TemporaryDirectory() as directory:
            scenario(Path(directory), lambda _: None)
    for line in sys.stdin:
        _, scenario_name, directory, words = line.split()
        begin, go = os.pipe()
        with Path(words).open("wb", buffering=0) as out:
            # Nothing that is counted may come before the word to go.
            pid = os.fork()
            if pid == 0:
                os.close(go)
                _child(begin, scenario_name, Path(directory), out)
        os.close(begin)
        _answer(pid)
        sys.stdin.readline()
        os.write(go, b"!")
        os.close(go)
        _answer(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _child(begin: int, scenario: str, directory: Path, out: io.FileIO) -> NoReturn:
    def say(word: str) -> None:
        out.write(f"{word}\n".encode())

    status = 1
    try:
        os.read(begin, 1)
        SCENARIOS[scenario](directory, say)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
