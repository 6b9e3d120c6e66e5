"""Reads the bytes of a job file, before any process runs it."""

from __future__ import annotations

import shlex
from pathlib import Path

from psrpc.core.errors import InvalidJob
from psrpc.files.urls import similar_path


def read_job_file(path: Path) -> bytes:
    """Reads a job file; a quick check before a process is started for it.

    Raises:
        InvalidJob: the file is missing or unreadable, or is a notebook.
    """
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise InvalidJob(
            f"there is no job file {str(path)!r} (in {Path.cwd()}){similar_path(path)}",
            code="PS102",
        ) from None
    except OSError as error:
        raise InvalidJob(
            f"the job file {str(path)!r} cannot be read: {error.strerror}", code="PS102"
        ) from None
    if path.suffix == ".ipynb":
        raise InvalidJob(
            f"the job file {str(path)!r} is a notebook; expected a Python file: `jupyter nbconvert "
            f"--to script {shlex.quote(str(path))}` writes {str(path.with_suffix('.py'))!r}"
        )
    return source


class UserCodeFailed(InvalidJob):
    """Code of the job file raised. The message is one line; ``user_traceback`` is the text of the
    traceback from the user's first frame on, to be shown before it."""

    code = "PS103"

    def __init__(self, message: str, user_traceback: str) -> None:
        super().__init__(message)
        self.user_traceback = user_traceback
