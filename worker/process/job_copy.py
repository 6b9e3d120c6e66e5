"""This machine's copy of the job, which must be the one that the coordinator has."""

from __future__ import annotations

import hashlib
from pathlib import Path

from psrpc import SOFTWARE
from psrpc.core.errors import InvalidJob, JobMismatch
from psrpc.options.job_keys import read_job_file
from psrpc.options.settings import WorkerOptions
from psrpc.v1 import coordinator_pb2 as pb
from worker.job.loader import LoadedJob, load_job, user_code


def check_job_copy(options: WorkerOptions, asked: pb.GetJobResponse) -> Path:
    """Compares this machine's job file and software with the coordinator's; returns the file.

    Raises:
        InvalidJob: there is no such file.
        JobMismatch: the coordinator has another file or software version.
    """
    if asked.software != SOFTWARE:
        raise JobMismatch(
            f"the coordinator at {options.coordinator} runs version {asked.software}; this worker "
            f"is {SOFTWARE}; install the same version everywhere",
            code="PS131",
        )
    path = Path(options.job or asked.job_path)
    try:
        source = read_job_file(path)
    except InvalidJob as error:
        hint = "" if options.job else "; say where it is here with --job FILE"
        raise InvalidJob(f"{error}{hint}", code=error.code) from None
    _check_same(path, hashlib.sha256(source).hexdigest(), asked)
    return path


def _check_same(path: Path, sha256: str, asked: pb.GetJobResponse) -> None:
    if sha256 != asked.job_sha256:
        raise JobMismatch(
            f"the job file {path} has SHA-256 {sha256[:12]} here, and "
            f"{asked.job_sha256[:12]} at the coordinator; copy the same file to every machine",
            code="PS132",
        )


def load_copy(options: WorkerOptions, asked: pb.GetJobResponse) -> LoadedJob:
    """Loads the job as the coordinator runs it, from this machine's copy of the file."""
    path = check_job_copy(options, asked)
    settings = [*asked.overrides, f"mode={asked.mode}"]
    if asked.replicas:
        settings.append(f"replicas={asked.replicas}")
    loaded = load_job(path, settings)
    _check_same(path, loaded.sha256, asked)
    with user_code("train"):
        fingerprint = loaded.job.train.fingerprint()
    if fingerprint != asked.data_fingerprint:
        raise JobMismatch(
            f"the training data of {path} has fingerprint {fingerprint[:12]} here, and "
            f"{asked.data_fingerprint[:12]} at the coordinator; copy the same data to every "
            "machine, or seed what makes it",
            code="PS133",
        )
    return loaded
