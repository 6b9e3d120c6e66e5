"""The process that a task of Spark, Ray or Slurm runs on its machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from threading import Thread

from psrpc.ops.process import PARENT_PID, child_environment

_ERROR = re.compile(r"^error (PS\d{3}: .*)")


class MemberEnded(Exception):
    """The process of a task has ended. Fails the task, so that its engine, or the study, starts it
    again."""


class EchoedProcess:
    """A process whose output goes to the standard error of this one. It ends with this process, or
    with the thread that has started it.

    Attributes:
        reason: the newest error line of its output, from the error's code on; empty without one.
    """

    def __init__(self, command: list[str], directory: str) -> None:
        self.reason = ""
        self._command = command
        self._directory = directory if Path(directory).is_dir() else None

    def run(self) -> int:
        """Runs it to its end; returns its status, -N after signal N."""
        self._start()
        self._copy()
        return self._process.wait()

    def start(self) -> None:
        """Starts it in a session of its own, so that Ctrl-C in a terminal does not reach it."""
        self._start(start_new_session=True)
        self._copier = Thread(target=self._copy, name="output", daemon=True)
        self._copier.start()

    def wait(self, limit_s: float) -> int | None:
        """Waits for its end; returns its status, or None if it still runs."""
        try:
            status = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        self._copier.join(limit_s)
        return status

    def send(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        self._process.send_signal(number)

    def _start(self, start_new_session: bool = False) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=self._directory,
            env=child_environment({**os.environ, PARENT_PID: str(os.getpid())}),
            start_new_session=start_new_session,
        )

    def _copy(self) -> None:
        assert self._process.stdout
        with self._process.stdout as output:
            for line in output:
                sys.stderr.write(line)
                sys.stderr.flush()
                if found := _ERROR.match(line):
                    self.reason = found[1]
