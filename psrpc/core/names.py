"""Names of the files and directories of a run."""

from __future__ import annotations

from pathlib import Path

from psrpc.core.errors import InvalidArgument

LONGEST = 200
"""Maximum length of a file name, in bytes of UTF-8. File systems allow 255, and temporary names are
a few bytes longer than final ones."""

DEEPEST = 4
"""Maximum number of parts of a path in a run directory; paths in use have two."""

RUNS = Path("runs")
ADDRESS = "address"
JOB = "job.json"
CERTS = "certs"
"""The directory of certificates that the run made for itself."""

PLAINTEXT = "plaintext"
"""A file that exists while the coordinator serves without certificates, even if the run has
certificates."""

CHECKPOINTS = "checkpoints"
"""The directory of a run's checkpoints. Load-bearing."""

SUMMARY = "summary.json"
HISTORY = "history.csv"
TOKEN = "token"
LOCK = "lock"
"""The file that the coordinator of the run keeps locked."""

STARTING = "starting"
"""The file that the process that starts the run keeps locked until the coordinator serves."""


def check_file_name(name: str, what: str) -> str:
    """Returns ``name`` if it is a plain file name; ``what`` describes it in the message.

    Raises:
        InvalidArgument: the name is empty, too long, hidden, a path, or has unprintable characters.
    """
    _check_part(name, what)
    if name.startswith("."):
        raise InvalidArgument(
            f"{what} is {name!r}; expected a plain file name, without a dot before it"
        )
    return name


def inside(directory: Path, name: str, what: str) -> Path:
    """Resolves ``name``, whose parts are joined by ``/``, in ``directory``; follows symbolic links.

    Raises:
        InvalidArgument: ``name`` leads out of ``directory``, or a part is not a plain name.
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
