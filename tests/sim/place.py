"""Where things are in a simulated cluster, and how long calls may take."""

from __future__ import annotations

from pathlib import Path

COORDINATOR = "coordinator:5000"

RUN_DIR = Path("/sim/run")

SHA = "ab" * 32
"""Of the job file."""

CALL_S, POLL_S, EXCHANGE_S = 10.0, 20.0, 60.0
"""Deadlines of a call that is answered at once, of one that may wait, of one with tensors."""
