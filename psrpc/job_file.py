"""The job file, as bytes."""

from __future__ import annotations

from pathlib import Path

from psrpc.errors import InvalidJob


def read_job_file(path: Path) -> bytes:
    """What is in it; also a quick look whether it is there, before a process is started for it.

    Raises:
        InvalidJob: there is none, or it cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InvalidJob(
            f"there is no job file {str(path)!r} (in {Path.cwd()})", code="PS102"
        ) from None
    except OSError as error:
        raise InvalidJob(
            f"the job file {str(path)!r} cannot be read: {error.strerror}", code="PS102"
        ) from None


class UserCodeFailed(InvalidJob):
    """Code of the job file raised. The message is one line; ``user_traceback`` is the text of the
    traceback from the user's first frame on, to be shown before it."""

    code = "PS103"

    def __init__(self, message: str, user_traceback: str) -> None:
        super().__init__(message)
        self.user_traceback = user_traceback
