from __future__ import annotations

import io
import re

from rich.console import Console

from coordinator.display.screen import LineScreen, Screen, TerminalScreen, open_screen
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


def waited(screen: Screen) -> None:
    for second in range(30):
        screen.waiting("the coordinator to read the job" if second < 20 else "", float(second))
    screen.show(STATUS)
    screen.close()


def test_a_wait_is_one_line_of_a_terminal_that_counts() -> None:
    out = io.StringIO()
    waited(open_screen(Console(file=out, force_terminal=True, width=80)))
    lines = out.getvalue().split("waiting for the coordinator to read the job ")[1:]
    assert [line.partition(" s)")[0] for line in lines] == [f"({n}" for n in range(3, 20)]
    # Nothing is left above the line, and nothing of it in the end.
    assert "\n" not in "".join(lines[:-1])
    assert out.getvalue().endswith("\x1b[1A\x1b[2K")


def test_a_wait_is_a_line_of_a_log_less_and_less_often() -> None:
    out = io.StringIO()
    waited(open_screen(Console(file=out, width=80)))
    waits = [line for line in out.getvalue().splitlines() if "to read the job" in line]
    assert [line.rpartition("(")[2] for line in waits] == ["3 s)", "6 s)", "12 s)"]
