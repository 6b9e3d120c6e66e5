"""Names of the files and directories of a run."""

from __future__ import annotations

from pathlib import Path

from psrpc.core.errors import InvalidArgument

LONGEST = 200
"""Bytes in UTF-8. File systems allow 255; temporary names are a few bytes longer."""

DEEPEST = 4
"""Most parts of a path in a run directory; two are in use."""

RUNS = Path("runs")
ADDRESS = "address"
JOB = "job.json"
CERTS = "certs"
"""Directory of certificates that the run made itself."""

PLAINTEXT = "plaintext"
"""Exists while the coordinator serves without certificates, even if the run has some."""

CHECKPOINTS = "checkpoints"
"""The directory of a run's checkpoints. Load-bearing."""

SUMMARY = "summary.json"
HISTORY = "history.csv"
TOKEN = "token"
LOCK = "lock"
"""Held by the coordinator of the run."""

STARTING = "starting"
"""Locked by the process that starts the run, until its coordinator serves."""


def check_file_name(name: str, what: str) -> str:
    """Returns ``name`` if it is a plain file name; ``what`` describes it in the message.

    Raises:
        InvalidArgument: it is empty, too long, hidden, a path, or has unprintable characters.
    """
    _check_part(name, what)
    if name.startswith("."):
        raise InvalidArgument(
            f"{what} is {name!r}; expected a plain file name, without a dot before it"
        )
    return name


def inside(directory: Path, name: str, what: str) -> Path:
    """Resolves ``name``, parts joined by ``/``, in ``directory``; follows symbolic links.

    Raises:
        InvalidArgument: it leads out of ``directory``, or a part is no plain name.
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
