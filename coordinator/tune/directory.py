"""The directory of a study: the study's description, its lock and its journal."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from psrpc.core.document import anything, mapped
from psrpc.core.errors import AlreadyExists, InvalidArgument, disk_code, disk_reason
from psrpc.core.names import JOB, LOCK, RUNS
from psrpc.core.text import sanitize
from psrpc.files.durable import ensure_directory
from psrpc.files.run_paths import is_running
from psrpc.files.storage import cause_of, read_json, replace_text

STUDY = "study.json"
"""The file that describes the study. Its name is load-bearing, as are those of the trials and of
the journal."""

JOURNAL = "journal.log"

RESULTS, BEST = "study.csv", "best.json"

PLACE = "kubernetes.json"
"""The file that says where the run directories of trials on Kubernetes are."""

_FLAGS = {
    "metric": "--metric",
    "mode": "--mode",
    "overrides": "--set",
    "replicas": "--replicas",
    "sampler": "--sampler",
    "seed": "--seed",
    "shards": "--shards",
    "workers": "--workers",
}


def new_study_directory(job: str) -> Path:
    """Returns the default directory of a study of the job called ``job``."""
    first = RUNS / f"{job}-study-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    later = (first.with_name(f"{first.name}-{attempt}") for attempt in itertools.count(2))
    return next(path for path in itertools.chain([first], later) if not path.exists())


class StudyDirectory:
    """The directory of a study. One process at a time holds it, in a ``with`` block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def __enter__(self) -> StudyDirectory:
        """Makes the directory if it does not exist, and locks it.

        Raises:
            AlreadyExists: another command runs the study.
            InvalidArgument: it cannot be made, or holds something else.
        """
        try:
            self._check_own()
            ensure_directory(self.path.absolute())
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise InvalidArgument(
                f"cannot use --run-dir {self.path}: {disk_reason(error)}", code=disk_code(error)
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._release()
            raise self._held() from None
        os.ftruncate(self._lock, 0)
        os.write(self._lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
        return self

    def check(self) -> None:
        """Checks whether a command could hold the directory; makes nothing.

        Raises:
            AlreadyExists: another command runs the study; names its process.
            InvalidArgument: the directory holds something else, or cannot be read.
        """
        try:
            self._check_own()
        except OSError as error:
            raise InvalidArgument(
                f"cannot use --run-dir {self.path}: {disk_reason(error)}", code=disk_code(error)
            ) from None
        if is_running(self.path):
            raise self._held()

    def _held(self) -> AlreadyExists:
        holder = ""
        with suppress(OSError):
            holder = sanitize((self.path / LOCK).read_text(errors="replace"), 300)
        return AlreadyExists(
            f"another `coordinator tune` runs the study in {self.path}"
            + (f": {holder}" if holder else "")
            + "; stop it first, or say another --run-dir",
            code="PS122",
        )

    def _check_own(self) -> None:
        """Refuses a directory with other files, which the study's would mix with."""
        if (self.path / JOB).exists():
            raise InvalidArgument(
                f"--run-dir {self.path} holds a run, and no study; say another directory"
            )
        if not self.path.exists():
            return
        names = {each.name for each in self.path.iterdir()}
        # A command that was killed early leaves no more than the lock and an unfinished file.
        other = sorted(names - {LOCK, f".{STUDY}.tmp"})
        if other and STUDY not in names:
            raise InvalidArgument(
                f"--run-dir {self.path} holds {other[0]!r}, and no study; say a new or an empty "
                "directory"
            )

    def __exit__(self, *_error: object) -> None:
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def journal(self) -> Path:
        """Optuna's journal."""
        return self.path / JOURNAL

    def trial(self, number: int) -> Path:
        """Returns the run directory of a trial."""
        return self.path / f"trial-{number:04d}"

    def settle(self, study: Mapping[str, Any]) -> bool:
        """Stores the description of the study, or compares it with one that is stored already;
        returns whether there was one.

        Raises:
            InvalidArgument: the directory has another study; names the first difference.
        """
        path = self.path / STUDY
        try:
            known = mapped(anything)(read_json(path), "")
        except FileNotFoundError:
            replace_text(path, json.dumps(study, indent=1) + "\n")
            return False
        except (OSError, ValueError) as error:
            reason = cause_of(error)
            raise InvalidArgument(
                f"{path} cannot be read: {reason}; say another --run-dir"
            ) from None
        for key, value in study.items():
            if known.get(key) != value:
                raise InvalidArgument(_difference(self.path, key, known.get(key), value))
        return True


def _difference(path: Path, key: str, before: Any, now: Any) -> str:
    other = f"the study in {path}"
    if key == "job_sha256":
        return (
            f"{other} began with another version of the job file; trials of both do not compare: "
            "begin another study with another --run-dir"
        )
    if key == "job":
        return f"{other} is of the job {before}, and this is {now}; say another --run-dir"
    if key == "space":
        before, now = (before or {}), (now or {})
        name = next(name for name in [*now, *before] if before.get(name) != now.get(name))
        said = [each.get(name, "not searched") for each in (before, now)]
        return (
            f"{other} has another space: {name} is {said[0]} there, and {said[1]} here; say the "
            "same again, or another --run-dir"
        )
    flag = _FLAGS.get(key, key)
    return (
        f"{other} has {flag} {_shown(before)}, and this command has {_shown(now)}; say the same "
        "again, or another --run-dir"
    )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "not at all"
    return "not at all" if value is None else str(value)


def mend_journal(path: Path) -> None:
    """Removes the remains of a process that was killed while it wrote to the journal: its lock, and
    an incomplete line. Only the holder of the directory may call this. Raises OSError."""
    for lock in path.parent.glob(f"{path.name}.lock*"):
        lock.unlink(missing_ok=True)
    try:
        with path.open("rb+") as journal:
            whole = journal.read().rfind(b"\n") + 1
            journal.truncate(whole)
    except FileNotFoundError:
        return
