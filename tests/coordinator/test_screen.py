from __future__ import annotations

import io
import re

from rich.console import Console

from coordinator.screen import LineScreen, TerminalScreen, open_screen
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse

STATUS = GetJobStatusResponse(job="mnist", phase="waiting", waiting_for="shard 0")


def test_lines_are_stamped_and_never_broken() -> None:
    out = io.StringIO()
    screen = open_screen(Console(file=out, width=20))
    assert isinstance(screen, LineScreen)
    screen.note("x" * 50 + " [bold]")
    screen.show(STATUS)
    screen.show(STATUS)
    screen.close()
    lines = out.getvalue().splitlines()
    assert [re.sub(r"^\[ *\d\.\d s\] ", "", line) for line in lines] == [
        "x" * 50 + " [bold]",
        "mnist: waiting",
        "waiting for shard 0",
    ]


def test_no_terminal_obeys_a_note() -> None:
    for terminal in (True, False):
        out = io.StringIO()
        screen = open_screen(Console(file=out, force_terminal=terminal))
        screen.note("worker-a said \x1b]0;owned\x07")
        screen.close()
        assert "worker-a said \ufffd]0;owned\ufffd" in out.getvalue()


def test_a_terminal_redraws_the_state_below_the_notes() -> None:
    out = io.StringIO()
    screen = open_screen(Console(file=out, force_terminal=True, width=80))
    assert isinstance(screen, TerminalScreen)
    screen.show(STATUS)
    screen.note("warning: something")
    screen.show(STATUS)
    screen.close()
    screen.close()
    text = out.getvalue()
    assert "waiting for shard 0" in text[: text.index("warning: something")]
    assert "waiting for shard 0" in text[text.index("warning: something") :]
