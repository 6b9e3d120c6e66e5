"""Objects of the caller's program in a file that its owner alone may read: classes and functions.

Those of a module that can be imported go by its name; those of ``__main__`` or of a notebook by
value.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cloudpickle

from psrpc.core.errors import InvalidJob


def save_object(path: Path, value: Any) -> None:
    """Writes an object; replaces the file.

    Raises:
        InvalidJob: the object holds something that only its own process can use, such as a lock.
    """
    try:
        content = cloudpickle.dumps(value)
    except Exception as error:  # whatever a class of the user raises
        reason = " ".join(str(error).split())
        raise InvalidJob(
            f"the model's classes and functions cannot be handed over: {reason}; move them to a "
            "module that the script imports, or leave out what they hold"
        ) from error
    path.unlink(missing_ok=True)
    with open(path, "xb", opener=_for_its_owner) as file:
        file.write(content)


def load_object(path: Path) -> Any:
    """Reads an object.

    Raises:
        InvalidJob: the file belongs to another user, or others may write it; or a module that it
            names cannot be imported.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise InvalidJob(f"{path} is open to other users; expected a file of its owner alone")
        return cloudpickle.loads(file.read())


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
