"""The requests to ``coordinator.launch.host``, which serves its caller's requests one after the
other.

A request is a line of JSON; its reply is a line with an exit status.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class UpRequest:
    """Requests a run of ``coordinator up`` with ``arguments``; ``output`` is the file for its
    output."""

    arguments: Sequence[str]
    output: str


@dataclass(frozen=True)
class PartsRequest:
    """Requests the ``count`` processes of an ``evaluate`` or ``predict`` that uses ``folder``;
    ``output`` is the file for the reasons of failures."""

    folder: str
    count: int
    output: str


HostRequest = UpRequest | PartsRequest

_KINDS: dict[str, type[HostRequest]] = {"up": UpRequest, "parts": PartsRequest}


def encode_request(request: HostRequest) -> str:
    """Returns a request as a line of JSON."""
    (kind,) = (name for name, each in _KINDS.items() if isinstance(request, each))
    return json.dumps({"kind": kind, **asdict(request)}) + "\n"


def decode_request(line: str) -> HostRequest:
    """Reverses :func:`encode_request`."""
    fields = json.loads(line)
    return _KINDS[fields.pop("kind")](**fields)
