from __future__ import annotations

import os
import subprocess
import sys

from psrpc.process import PARENT_PID

CHILD = (
    "import os; from psrpc.process import *; die_with_parent(); print(os.environ.get(PARENT_PID))"
)


def start(parent: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD.replace("PARENT_PID", repr(PARENT_PID))],
        capture_output=True,
        text=True,
        env={**os.environ, PARENT_PID: str(parent)},
        check=False,
    )


def test_a_child_goes_on_under_its_parent_and_keeps_the_name_to_itself() -> None:
    assert start(os.getpid()).stdout == "None\n"


def test_a_child_whose_parent_ended_while_it_started_does_not_begin() -> None:
    # To the child it looks as if it had been handed on to another process.
    orphan = start(os.getpid() + 1)
    assert (orphan.returncode, orphan.stdout) == (1, "")
