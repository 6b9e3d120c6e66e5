"""Names of the files and directories of a run."""

from __future__ import annotations

from pathlib import Path

RUNS = Path("runs")
ADDRESS = "address"
JOB = "job.json"

CERTS = "certs"
"""Certificates of the run, where it made them itself."""

PLAINTEXT = "plaintext"
"""There while a coordinator answers without certificates, whether or not the run has some."""

CHECKPOINTS = "checkpoints"
"""The directory of a run's checkpoints. Load-bearing."""

SUMMARY = "summary.json"
HISTORY = "history.csv"
TOKEN = "token"

LOCK = "lock"
"""Held by the coordinator of the run."""

STARTING = "starting"
"""Locked by who starts the run, until its coordinator serves."""
