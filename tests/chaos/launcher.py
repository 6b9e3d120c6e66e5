"""Starts the processes of a cluster without importing everything anew for each of them.

A thousand schedules start some ten thousand processes. So that they cost what they do and not what
their imports take, a process that has imported everything, and done nothing else, forks each one.
What runs in them is the command itself, with the command line that a user would type.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

Entry = Callable[[Sequence[str]], int]
"""What a process does with its arguments; its exit status."""


@dataclass(frozen=True)
class Exit:
    """A process that has ended; ``status`` is -N when signal N killed it."""

    pid: int
    status: int


class Launcher:
    """Forks processes. Start it from a process with one thread and no gRPC channel.

    The child processes end with it, and it ends with its owner.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._pid = 0
        self._socket: socket.socket
        self._lines: Any
        self._exits: list[Exit] = []

    def __enter__(self) -> Launcher:
        ours, theirs = socket.socketpair()
        gc.collect()
        gc.freeze()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            _run(theirs, self._entries)
        theirs.close()
        self._socket = ours
        self._lines = ours.makefile("r")
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._socket.close()
        os.waitpid(self._pid, 0)

    def start(
        self, entry: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> int:
        """Runs an entry in a process of its own; its output is appended to ``log``."""
        return int(
            self._ask(
                do="start",
                entry=entry,
                arguments=list(arguments),
                log=str(log),
                environment=dict(environment),
            )
        )

    def signal(self, pid: int, number: int) -> bool:
        """Sends a signal; False when the process has ended."""
        return bool(self._ask(do="signal", pid=pid, number=number))

    def exits(self) -> list[Exit]:
        """The processes that have ended since the last call."""
        while select.select([self._socket], [], [], 0)[0]:
            self._read()
        found, self._exits = self._exits, []
        return found

    def _ask(self, **request: Any) -> Any:
        self._socket.sendall((json.dumps(request) + "\n").encode())
        while True:
            answer = self._read()
            if answer is not None:
                return answer["answer"]

    def _read(self) -> dict[str, Any] | None:
        """One line: an answer, or None after the news of an end."""
        line = self._lines.readline()
        if not line:
            raise RuntimeError("the launcher has died")
        message: dict[str, Any] = json.loads(line)
        if "pid" in message:
            self._exits.append(Exit(message["pid"], message["status"]))
            return None
        return message


def _run(owner: socket.socket, entries: Mapping[str, Entry]) -> NoReturn:
    """The launcher's own process."""
    # A line for each end of a child, to wake the loop.
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    alive: set[int] = set()
    buffer = b""
    while True:
        ready, _, _ = select.select([owner, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                woken.recv(4096)
            _reap(owner, alive)
        if owner not in ready:
            continue
        received = owner.recv(1 << 16)
        if not received:
            break
        *lines, buffer = (buffer + received).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if request["do"] == "start":
                pid = _fork(request, entries, (owner, wake, woken))
                alive.add(pid)
                answer = pid
            else:
                answer = int(request["pid"] in alive)
                if answer:
                    os.kill(request["pid"], request["number"])
            _say(owner, {"answer": answer})
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _reap(owner: socket.socket, alive: set[int]) -> None:
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        alive.discard(pid)
        _say(owner, {"pid": pid, "status": os.waitstatus_to_exitcode(status)})


def _say(owner: socket.socket, message: dict[str, Any]) -> None:
    # An owner that has died needs no answer; the next read will tell.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        owner.sendall((json.dumps(message) + "\n").encode())


def _fork(
    request: dict[str, Any], entries: Mapping[str, Entry], sockets: Sequence[socket.socket]
) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for one in sockets:
            one.close()
        _redirect(request["log"])
        os.environ.update(request["environment"])
        status = entries[request["entry"]](request["arguments"])
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)


def _redirect(log: str) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.close(null)
