"""Processes are forked, told apart, and end with their launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster import ROOT

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from tests.chaos.launcher import Launcher

folder = Path(sys.argv[1])

def say(arguments):
    print(os.environ["WHO"], *arguments)
    return 3

def fail(arguments):
    raise ValueError("by design")

def wait(arguments):
    time.sleep(600)

def until(count):
    found = []
    while len(found) < count:
        found += launcher.exits()
    return {one.pid: one.status for one in found}

with Launcher({"say": say, "fail": fail, "wait": wait}) as launcher:
    said = launcher.start("say", ["a", "b"], folder / "say", {"WHO": "me"})
    failed = launcher.start("fail", [], folder / "fail", {})
    assert until(2) == {said: 3, failed: 1}
    killed = launcher.start("wait", [], folder / "wait", {})
    left = launcher.start("wait", [], folder / "wait", {})
    assert launcher.signal(killed, signal.SIGKILL)
    assert until(1) == {killed: -9}
    assert not launcher.signal(killed, signal.SIGKILL)
    # Many ends at once, while others are asked for: none is missed.
    many = {launcher.start("say", [str(i)], folder / "many", {"WHO": "x"}) for i in range(40)}
    assert until(40) == dict.fromkeys(many, 3)
try:
    os.kill(left, 0)
except ProcessLookupError:
    print("all gone")
"""


@pytest.mark.slow
def test_processes_start_and_end(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all gone\n"
    assert (tmp_path / "say").read_text() == "me a b\n"
    assert "ValueError: by design" in (tmp_path / "fail").read_text()
