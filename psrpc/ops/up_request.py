"""The request to ``coordinator.launch.host``, which runs one job after another for its caller."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class UpRequest:
    """A run of ``coordinator up``: its ``arguments``, and the file that gets its ``output``. The
    reply is a line with the exit status."""

    arguments: Sequence[str]
    output: str

    def encode(self) -> str:
        """Returns the request as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def decode(cls, line: str) -> UpRequest:
        """Reverses :meth:`encode`."""
        return cls(**json.loads(line))
