"""Programs for a process of their own: a process may choose its devices only once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.e2e.cluster import LIMIT_S, ended


def run_fresh(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a Python program by an interpreter of its own in ``folder``; returns its status and what
    it printed."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def run_forked(code: str) -> subprocess.CompletedProcess[str]:
    """The same as a fork of a process that has imported TensorFlow and computed nothing."""
    return ended("tests.fresh_interpreter", code)


if __name__ == "__main__":
    exec(sys.argv[1], {"__name__": "__main__"})
