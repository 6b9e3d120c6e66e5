"""Who may take part: processes of the same software version, workers with the same job file."""

from __future__ import annotations

from coordinator.core.run import Run
from psrpc.core.errors import JobMismatch
from psrpc.core.version import SOFTWARE


def check_software(who: str, software: str) -> None:
    """Raises JobMismatch if ``who`` runs another version than this process."""
    if software != SOFTWARE:
        raise JobMismatch(
            f"{who} runs version {software or 'unknown'} of this software, the coordinator "
            f"{SOFTWARE}; install the same on both",
            code="PS131",
        )


def check_job(run: Run, who: str, job_sha256: str, settings_sha256: str) -> None:
    """Raises JobMismatch if ``who`` has loaded another job file than the coordinator's, or the
    same with other settings; empty ones are not compared."""
    if job_sha256 != run.description.job_sha256:
        raise JobMismatch(
            f"the job file of {who} has SHA-256 {job_sha256}, the coordinator's {run.job_path} "
            f"has {run.description.job_sha256}; give every worker the same file, with --job "
            "where it lies elsewhere",
            code="PS132",
        )
    if settings_sha256 not in ("", run.settings_sha256):
        now = " ".join(run.overrides) or "no --set"
        raise JobMismatch(
            f"{who} has loaded the job as it was before: the run goes on with other settings or "
            f"data ({now}; mode {run.description.mode}); start the worker again",
            code="PS132",
        )
