"""The description of a run that goes on, from its run directory.

``worker describe`` takes seconds: it imports TensorFlow and builds the model. A coordinator that
is started again while its shards and workers wait need not: the run directory says what the job
was, and a worker whose job, data or settings are others than that is refused in any case.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.core.description import JobDescription, read_description
from psrpc.core.document import anything, mapped
from psrpc.core.errors import InvalidJob
from psrpc.core.run_names import JOB
from psrpc.core.version import SOFTWARE
from psrpc.files.storage import read_json


def started_with(
    job: Path,
    overrides: Sequence[str],
    mode: str | None,
    replicas: int | None,
    description: JobDescription,
) -> dict[str, Any]:
    """What is kept in the run directory."""
    return {**_command(job, overrides, mode, replicas), "description": description.document}


def remembered(
    run_dir: Path, job: Path, overrides: Sequence[str], mode: str | None, replicas: int | None
) -> JobDescription | None:
    """The job of the run in ``run_dir``, if it was started just so, from the same bytes of the job
    file and by the same software; None where it has to be described."""
    try:
        kept = mapped(anything)(read_json(run_dir / JOB), "")
        sha256 = hashlib.sha256(job.read_bytes()).hexdigest()
        same = _command(job, overrides, mode, replicas)
        if any(kept.get(key) != value for key, value in same.items()):
            return None
        description = read_description(kept.get("description"))
    except (OSError, ValueError, InvalidJob):
        return None
    return description if description.job_sha256 == sha256 else None


def _command(
    job: Path, overrides: Sequence[str], mode: str | None, replicas: int | None
) -> dict[str, Any]:
    return {
        "job": str(job),
        "overrides": list(overrides),
        "mode": mode,
        "replicas": replicas,
        "software": SOFTWARE,
    }
