"""The run directory: storage that the coordinator shares with all shards, one run in each."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from coordinator.core.description import JobDescription
from coordinator.core.description_reader import read_description
from psrpc import SOFTWARE
from psrpc.core.document import anything, mapped
from psrpc.core.errors import AlreadyExists, InvalidJob, disk_code
from psrpc.core.names import ADDRESS, JOB, LOCK, PLAINTEXT, RUNS, STARTING, TOKEN
from psrpc.files.durable import ensure_directory
from psrpc.files.run_paths import LONGEST_TOKEN, is_running, newest_run
from psrpc.files.storage import make_private, read_bounded, read_json, replace_text
from psrpc.files.urls import similar_path

LEDGER = "ledger.sqlite"


def new_run_directory(name: str, utc: datetime) -> Path:
    """Returns the default directory of a run of the job called ``name``."""
    return RUNS / f"{name}-{utc:%Y%m%d-%H%M%S}"


def newest_run_directory(name: str) -> Path:
    """Returns the newest run of the job called ``name``: :func:`psrpc.files.run_paths.newest_run`.

    Raises:
        InvalidJob: there is none.
    """
    newest = newest_run(name)
    if newest is None:
        raise InvalidJob(
            f"--resume finds no run of {name} under {RUNS}/; say which with --run-dir", code="PS125"
        )
    return newest


def check_holds_run(path: Path) -> None:
    """Raises InvalidJob if there is nothing to resume."""
    if not path.exists():
        raise InvalidJob(
            f"--resume: there is no directory {path}{similar_path(path)}", code="PS125"
        )
    if not (path / LEDGER).exists():
        raise InvalidJob(f"--resume: {path} holds no run (it has no {LEDGER})", code="PS125")


def check_free(path: Path) -> None:
    """Refuses a run directory that is in use, before seconds are spent on the job; changes nothing.

    Raises:
        AlreadyExists: another coordinator has it.
    """
    if is_running(path):
        raise _in_use(path.absolute())


def _in_use(path: Path) -> AlreadyExists:
    return AlreadyExists(
        f"another coordinator is running on {path}; stop it first, or choose another --run-dir",
        code="PS122",
    )


class Starting:
    """Marks a run as being started, from ``hold`` to ``release`` or the end of this process.
    Searches for the newest run look at the mark."""

    def __init__(self, path: Path) -> None:
        self._path = path / STARTING
        self._lock: int | None = None

    def hold(self) -> None:
        """Sets the mark; idempotent. Raises OSError."""
        if self._lock is None:
            self._lock = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            with contextlib.suppress(BlockingIOError):
                # Another process that starts the same run has set it; one of the two will be
                # refused.
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Removes the mark; idempotent."""
        if self._lock is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


class RunDirectory:
    """One run's directory, held by one coordinator at a time: use it with ``with``."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.path = path.absolute()
        self._resume = resume
        self._lock: int | None = None

    def __enter__(self) -> RunDirectory:
        """Creates the directory, or takes over one that holds a run.

        Raises:
            AlreadyExists: another coordinator has it.
            InvalidJob: it cannot be created, or there is nothing to resume.
        """
        if self._resume:
            check_holds_run(self.path)
        try:
            ensure_directory(self.path)
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise InvalidJob(
                f"cannot use run directory {self.path}: {error.strerror}; choose another --run-dir",
                code=disk_code(error),
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._unlock()
            raise _in_use(self.path) from None
        return self

    def __exit__(self, *_error: object) -> None:
        for name in (ADDRESS, PLAINTEXT):
            (self.path / name).unlink(missing_ok=True)
        self._unlock()

    def token(self) -> str:
        """Returns the present secret; empty if none can be read."""
        try:
            return read_bounded(self.path / TOKEN, LONGEST_TOKEN).decode("ascii")
        except (OSError, ValueError):
            return ""

    def new_token(self) -> str:
        """Writes a fresh secret, readable by its owner only, and returns it."""
        token = secrets.token_hex(16)
        temporary = self.path / f".{TOKEN}.tmp"
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(token)
        temporary.replace(self.path / TOKEN)
        return token

    def write_address(self, address: str, *, encrypted: bool = False) -> None:
        """Publishes the coordinator's address atomically, and first whether it is plaintext, since
        the run may have certificates from another time."""
        if encrypted:
            # A killed coordinator may have left the file.
            (self.path / PLAINTEXT).unlink(missing_ok=True)
        else:
            (self.path / PLAINTEXT).touch()
        self._write(ADDRESS, address + "\n")

    def write_job(self, document: dict[str, object]) -> None:
        """Stores the arguments and the description that the run was started with. The file's time
        is the start time, so this is called when nothing can refuse the start any more."""
        # The command line may contain passwords.
        make_private(self.path / JOB)
        self._write(JOB, json.dumps(document, indent=2) + "\n", private=True)

    def _write(self, name: str, text: str, *, private: bool = False) -> None:
        path = self.path / name
        with contextlib.suppress(OSError):
            if read_bounded(path) == text.encode():
                # The disk may be full; setting the time still marks the file as written now.
                os.utime(path)
                return
        replace_text(path, text, private=private)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def started_with(
    job: Path,
    overrides: Sequence[str],
    mode: str | None,
    replicas: int | None,
    description: JobDescription,
) -> dict[str, Any]:
    """Returns the document for :meth:`RunDirectory.write_job`."""
    return {**_command(job, overrides, mode, replicas), "description": description.document}


def remembered(
    run_dir: Path, job: Path, overrides: Sequence[str], mode: str | None, replicas: int | None
) -> JobDescription | None:
    """Returns the job of the run in ``run_dir`` if it was started with the same arguments, job file
    and software; None if it must be described anew."""
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
