"""Programs for an interpreter of their own: a process may choose its devices only once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.test_architecture import ROOT

LIMIT_S = 240.0
"""How long a program may take."""


def run_fresh(code: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs a Python program in ``folder``; returns its status and what it printed."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
