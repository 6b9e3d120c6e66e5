"""Shows the progress of a job on a console: in place on a terminal, as lines elsewhere."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from coordinator.core.wording import duration
from coordinator.display.terminal import ProgressLog, render
from psrpc.core.text import sanitize
from psrpc.ops.retry import FIRST_S, Announcer
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse


class Screen(Protocol):
    """A display of progress. Call :meth:`close` before anything else is printed."""

    def show(self, status: GetJobStatusResponse) -> None:
        """Shows the newest state of the job."""

    def note(self, line: str) -> None:
        """Prints an event that stays readable."""

    def waiting(self, what: str, now: float) -> None:
        """Shows that the caller itself waits for ``what``; empty once it no longer waits. Call it
        often.

        Args:
            now: seconds on a clock that never goes back.
        """

    def close(self) -> None:
        """Ends the display. May be called twice."""


class TerminalScreen:
    """One block that is redrawn, and removed at the end; notes scroll above it and stay."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._began = time.monotonic()
        self._status: RenderableType | None = None
        self._since: float | None = None
        self._waiting = ""

    def show(self, status: GetJobStatusResponse) -> None:
        """See :class:`Screen`."""
        self._status = render(status, time.monotonic() - self._began)
        self._draw()

    def waiting(self, what: str, now: float) -> None:
        """See :class:`Screen`: one line that counts the seconds."""
        self._since = (now if self._since is None else self._since) if what else None
        waited_s = 0.0 if self._since is None else now - self._since
        line = f"waiting for {sanitize(what)} ({waited_s:.0f} s)" if waited_s >= FIRST_S else ""
        if line != self._waiting:
            self._waiting = line
            self._draw()

    def _draw(self) -> None:
        parts = [] if self._status is None else [self._status]
        if self._waiting:
            parts.append(Text(self._waiting, "yellow"))
        self._live.start()
        self._live.update(Group(*parts), refresh=True)

    def note(self, line: str) -> None:
        """See :class:`Screen`."""
        self._live.console.print(Text(sanitize(line)))

    def close(self) -> None:
        """See :class:`Screen`."""
        self._live.stop()


class LineScreen:
    """One line every few seconds and for every event, each with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._log = ProgressLog()
        self._began = time.monotonic()
        self._announcer = Announcer(
            lambda what, waited_s: self.note(f"waiting for {what} ({waited_s:.0f} s)")
        )

    def show(self, status: GetJobStatusResponse) -> None:
        """See :class:`Screen`."""
        for line in self._log.lines(status, time.monotonic()):
            self.note(line)

    def note(self, line: str) -> None:
        """See :class:`Screen`."""
        stamp = f"[{duration(time.monotonic() - self._began):>7}]"
        self._console.print(Text(f"{stamp} {sanitize(line)}"), soft_wrap=True)

    def waiting(self, what: str, now: float) -> None:
        """See :class:`Screen`: prints a line at growing intervals."""
        if what:
            self._announcer.waiting(what, now)
        else:
            self._announcer.over()

    def close(self) -> None:
        """See :class:`Screen`."""


def open_screen(console: Console) -> Screen:
    """Returns the screen that suits ``console``."""
    return TerminalScreen(console) if console.is_terminal else LineScreen(console)
