"""Runs FOLDER/code.py, as ``python -m tests.coordinator.launch.a_part FOLDER INDEX COUNT``."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    exec(Path(sys.argv[1], "code.py").read_text())
