"""A terminal that is closed while ``coordinator up`` runs in it."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from psrpc.checkpoint.checkpoint import newest_good
from psrpc.files.run_paths import read_summary
from tests.e2e.cluster import (
    JOBS,
    LIMIT_S,
    Gate,
    command,
    environment,
    processes_of,
    until,
)

pytestmark = pytest.mark.slow

STEPS = 21
"""Rounds of an epoch."""

OPENS = """
import os, runpy, sys
# A session of its own gets the first terminal that it opens.
os.close(os.open(os.ttyname(0), os.O_RDWR))
os.execvp(sys.argv[1], sys.argv[1:])
"""


def read(terminal: int) -> None:
    """Takes the output that is there, so that writers do not block."""
    with suppress(BlockingIOError):
        while os.read(terminal, 1 << 16):
            pass


def test_a_terminal_that_is_closed_saves_and_ends_as_ctrl_c_does(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with ExitStack() as stack:
        gate = stack.enter_context(closing(Gate(tmp_path, epoch=1)))
        leader, terminal = os.openpty()
        up = command(
            *("coordinator", "up", JOBS / "gated.py", "--run-dir", run_dir, "--mode", "sync")
        )
        process = subprocess.Popen(
            [up[0], "-c", OPENS, *up],
            env=environment(**gate.environment),
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        os.close(terminal)
        os.set_blocking(leader, False)
        log = run_dir / "logs" / "worker-a.log"

        def waits() -> bool:
            read(leader)
            return log.exists() and "waiting for the training data" in log.read_text()

        until(waits, "the end of the first epoch")
        os.close(leader)
        saved = run_dir / "checkpoints" / f"step-{STEPS:08d}"
        until(saved.exists, "the checkpoint at the end")
        # Or all would wait for the worker, which hangs while it reads its data.
        gate.open()
        assert process.wait(LIMIT_S) == 130
    summary = read_summary(run_dir)
    assert (summary["reason"], summary["global_step"]) == ("stopped by a signal", STEPS)
    assert newest_good(run_dir / "checkpoints").manifest.global_step == STEPS
    assert not processes_of(run_dir)
