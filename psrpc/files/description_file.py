"""A job's description in a file. ``worker describe`` writes it where TensorFlow is installed; a
coordinator reads it without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psrpc import SOFTWARE
from psrpc.core.document import anything, listed, mapped, maybe, parse_json, text
from psrpc.core.errors import InvalidJob, JobMismatch

MAX_NBYTES = 64 << 20
"""Maximum size of a file that is read."""


@dataclass(frozen=True)
class DescriptionFile:
    """The description of a job, and the options that it was made with.

    Attributes:
        settings: the values of ``--set``, in order; the description depends on them.
        mode: the value of ``--mode``.
        description: JSON types, as ``worker describe`` prints them; has the job file's SHA-256.
    """

    settings: tuple[str, ...]
    mode: str | None
    description: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Returns the file's content as JSON types."""
        return {
            "software": SOFTWARE,
            "settings": list(self.settings),
            "mode": self.mode,
            "description": dict(self.description),
        }

    @classmethod
    def parse(cls, data: bytes, name: str) -> DescriptionFile:
        """Parses the content of the file called ``name``. Does not check the description itself.

        Raises:
            InvalidJob: the file is not a description file.
            JobMismatch: another version of this software wrote it.
        """
        try:
            document = mapped(anything)(parse_json(data), "the file")
            software = text(document.get("software"), "software")
            settings = listed(text)(document.get("settings"), "settings")
            mode = maybe(text)(document.get("mode"), "mode")
            description = mapped(anything)(document.get("description"), "description")
        except ValueError as error:
            raise InvalidJob(
                f"--description {name} is no description of a job ({error}); write it with "
                f"`worker describe JOB -o {name}`"
            ) from None
        if software != SOFTWARE:
            raise JobMismatch(
                f"--description {name} was written by version {software}, this is {SOFTWARE}; "
                f"write it anew with `worker describe JOB -o {name}` of version {SOFTWARE}",
                code="PS131",
            )
        return cls(tuple(settings), mode, description)
