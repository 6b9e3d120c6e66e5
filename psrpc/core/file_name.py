"""The one check between a name that somebody else chose and the file system: names never become
paths. Files of jobs, tables and variables are named by numbers; what else is named by a peer or by
a file (snapshots, a checkpoint's files) passes here."""

from __future__ import annotations

from pathlib import Path

from psrpc.core.errors import InvalidArgument

LONGEST = 200
"""Bytes in UTF-8. File systems take 255; temporary names are longer by a few."""

DEEPEST = 4
"""Parts of a place in a run directory; there are two."""


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
