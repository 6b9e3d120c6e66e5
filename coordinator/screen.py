"""Puts the progress of a job on a console: in place on a terminal, as lines elsewhere."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from coordinator.display import ProgressLog, render
from coordinator.wording import duration
from psrpc.told import told
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse


class Screen(Protocol):
    """Where progress goes. Call :meth:`close` before anything else is printed."""

    def show(self, status: GetJobStatusResponse) -> None:
        """The newest state of the job."""

    def note(self, line: str) -> None:
        """Something that happened; stays to be read."""

    def close(self) -> None:
        """Shows no more. May be called twice."""


class TerminalScreen:
    """One block that is redrawn, and removed in the end; notes scroll above it and stay."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._began = time.monotonic()

    def show(self, status: GetJobStatusResponse) -> None:
        """See :class:`Screen`."""
        self._live.start()
        self._live.update(render(status, time.monotonic() - self._began), refresh=True)

    def note(self, line: str) -> None:
        """See :class:`Screen`."""
        self._live.console.print(Text(told(line)))

    def close(self) -> None:
        """See :class:`Screen`."""
        self._live.stop()


class LineScreen:
    """One line every few seconds and for every event, each with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._log = ProgressLog()
        self._began = time.monotonic()

    def show(self, status: GetJobStatusResponse) -> None:
        """See :class:`Screen`."""
        for line in self._log.lines(status, time.monotonic()):
            self.note(line)

    def note(self, line: str) -> None:
        """See :class:`Screen`."""
        stamp = f"[{duration(time.monotonic() - self._began):>7}]"
        self._console.print(Text(f"{stamp} {told(line)}"), soft_wrap=True)

    def close(self) -> None:
        """See :class:`Screen`."""


def open_screen(console: Console) -> Screen:
    """The one that suits ``console``."""
    return TerminalScreen(console) if console.is_terminal else LineScreen(console)
