"""Runs scenarios under strace, which fails or kills them at one system call of theirs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pytest

STORAGE_CALLS = (
    "open,openat,creat,mkdir,mkdirat,write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync,"
    "sync_file_range,ftruncate,truncate,fallocate,rename,renameat,renameat2,link,linkat,symlink,"
    "symlinkat,unlink,unlinkat,rmdir"
)
"""All that changes a file system, and opens, which may make a file."""

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed (apt-get install strace)"
)

_LINE = re.compile(r"(\w+)\(.*\) += ")


@dataclass(frozen=True)
class Call:
    """One system call: the ``number``-th of its ``name``, counted from 1, as strace shows it."""

    name: str
    number: int
    text: str

    @property
    def failed(self) -> bool:
        """Whether it returned an error."""
        return "= -1 " in self.text


@dataclass(frozen=True)
class Outcome:
    """Outcome of a scenario: exit status (negative: the signal), output, system calls."""

    status: int
    words: tuple[str, ...]
    calls: tuple[Call, ...]

    def calls_on(self, directory: Path) -> list[Call]:
        """Those on a directory and on what is in it."""
        place = re.compile(re.escape(str(directory)) + r"[/>\"]")
        return [call for call in self.calls if place.search(call.text)]


class Zygote:
    """A process that starts scenarios; a context manager."""

    def __enter__(self) -> Zygote:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(30) == 0 or error is not None

    def run(self, scenario: str, directory: Path, fault: str | None = None) -> Outcome:
        """Runs a scenario in ``directory``, with a fault in the words of ``strace -e inject=``."""
        directory.mkdir()
        words, log = directory.with_suffix(".words"), directory.with_suffix(".log")
        pid = self._ask(f"start {scenario} {directory} {words}")
        command = ["strace", "-y", "-o", str(log), "-p", str(pid), "-e", f"trace={STORAGE_CALLS}"]
        if fault is not None:
            command += ["-e", f"inject={fault}"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            assert strace.stderr is not None
            attached = strace.stderr.readline()
            status = self._ask("go")
            strace.stderr.read()
            strace.wait(30)
        if "attached" not in attached:
            pytest.skip(f"strace cannot attach to a process here: {attached.strip()}")
        return Outcome(status, tuple(words.read_text().splitlines()), _parse(log.read_text()))

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def _parse(log: str) -> tuple[Call, ...]:
    counts: Counter[str] = Counter()
    calls = []
    for line in log.splitlines():
        found = _LINE.match(line)
        if found:
            counts[found[1]] += 1
            calls.append(Call(found[1], counts[found[1]], line))
    return tuple(calls)
