"""Names of the files and directories of a run."""

from __future__ import annotations

from pathlib import Path

from psrpc.core.errors import InvalidArgument

LONGEST = 200
"""Bytes in UTF-8. File systems take 255; temporary names are longer by a few."""

DEEPEST = 4
"""Parts of a place in a run directory; there are two."""


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


def check_file_name(name: str, what: str) -> str:
    """``name``, if it can be that of a file of ours and nothing else.

    Args:
        what: whose name it is, for the message.

    Raises:
        InvalidArgument: it is empty, too long, hidden, a path, or has characters that no name has.
    """
    _check_part(name, what)
    if name.startswith("."):
        raise InvalidArgument(
            f"{what} is {name!r}; expected a plain file name, without a dot before it"
        )
    return name


def inside(directory: Path, name: str, what: str) -> Path:
    """The place ``name``, parts joined by ``/``, in ``directory``, symbolic links followed.

    Raises:
        InvalidArgument: it is elsewhere, or a part is no name.
    """
    parts = name.split("/")
    if len(parts) > DEEPEST:
        raise InvalidArgument(f"{what} has {len(parts)} parts; expected {DEEPEST} at most")
    for part in parts:
        _check_part(part, what)
    try:
        found = directory.joinpath(*parts).resolve()
        root = directory.resolve()
    except (OSError, RuntimeError) as error:
        raise InvalidArgument(f"{what} is {name!r}, which cannot be looked up: {error}") from None
    if not found.is_relative_to(root):
        raise InvalidArgument(f"{what} is {found}; expected a place in {directory}")
    return found


def _check_part(name: str, what: str) -> None:
    shown = name if len(name) <= LONGEST else f"{name[:LONGEST]}..."
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise InvalidArgument(f"{what} is {shown!r}; expected a plain file name, not a path")
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        nbytes = -1
    if nbytes < 0 or not name.isprintable():
        raise InvalidArgument(f"{what} is {shown!r}; expected printable characters only")
    if nbytes > LONGEST:
        raise InvalidArgument(f"{what} has {nbytes} bytes ({shown!r}); expected {LONGEST} at most")
