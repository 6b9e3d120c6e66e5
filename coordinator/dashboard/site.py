"""The pages of a web server: the one at its root, and the data behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Shown(Protocol):
    """The data of a job's page; the server's thread calls it. Both methods raise PsError with the
    reason while the data is not available."""

    def status(self) -> Any:
        """Returns the content of ``/status.json``, see ``DashboardSnapshots.status``."""

    def history(self) -> Any:
        """Returns the content of ``/history.json``, see ``DashboardSnapshots.history``."""


@dataclass(frozen=True)
class Site:
    """The content of a web server.

    Attributes:
        front: the file in ``web`` that is the page at ``/``.
        answers: functions by path. Each returns what the path has as JSON, and raises PsError with
            the reason while that is not available; the server's thread calls it.
    """

    front: str
    answers: Mapping[str, Callable[[], Any]]


def job_site(shown: Shown) -> Site:
    """Returns the page of one job."""
    return Site("index.html", {"/status.json": shown.status, "/history.json": shown.history})
