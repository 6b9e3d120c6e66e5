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
        self._buffer = b""
        self._exits: list[Exit] = []

    def __enter__(self) -> Launcher:
        ours, theirs = socket.socketpair()
        gc.collect()
        gc.freeze()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            _serve(theirs, self._entries)
        theirs.close()
        self._socket = ours
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        os.waitpid(self._pid, 0)

    def start(
        self, entry: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> int:
        """Runs an entry in a process of its own; its output is appended to ``log``."""
        return self._ask(
            do="start",
            entry=entry,
            arguments=list(arguments),
            log=str(log),
            environment=dict(environment),
        )

    def signal(self, pid: int, number: int) -> bool:
        """Sends a signal; False when the process has ended."""
        return bool(self._ask(do="signal", pid=pid, number=number))

    def exits(self) -> list[Exit]:
        """The processes that have ended since the last call."""
        while select.select([self._socket], [], [], 0)[0]:
            assert not self._read(), "nothing was asked"
        found, self._exits = self._exits, []
        return found

    def _ask(self, **request: Any) -> int:
        self._socket.sendall((json.dumps(request) + "\n").encode())
        while True:
            for answer in self._read():
                return answer

    def _read(self) -> list[int]:
        """Reads all messages that have come: returns answers, notes ends."""
        received = self._socket.recv(1 << 16)
        if not received:
            raise RuntimeError("the launcher has died")
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        messages = [json.loads(line) for line in lines]
        self._exits += [Exit(m["pid"], m["status"]) for m in messages if "pid" in m]
        return [int(m["answer"]) for m in messages if "answer" in m]


def _serve(owner: socket.socket, entries: Mapping[str, Entry]) -> NoReturn:
    """The launcher's own process; whatever happens, its children end with it."""
    alive: set[int] = set()
    # An end of a child wakes the loop.
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    try:
        # An owner that has died is no news.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            _obey(owner, woken, entries, alive)
    except BaseException:
        traceback.print_exc()
    finally:
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        for pid in alive:
            os.waitpid(pid, 0)
        os._exit(0)


def _obey(
    owner: socket.socket, woken: socket.socket, entries: Mapping[str, Entry], alive: set[int]
) -> None:
    """Does what the owner says, until it has gone."""
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
            return
        *lines, buffer = (buffer + received).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if request["do"] == "start":
                pid = _fork(request, entries, (owner, woken))
                alive.add(pid)
                answer = pid
            else:
                answer = int(request["pid"] in alive)
                if answer:
                    os.kill(request["pid"], request["number"])
            _say(owner, {"answer": answer})


def _reap(owner: socket.socket, alive: set[int]) -> None:
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        alive.discard(pid)
        _say(owner, {"pid": pid, "status": os.waitstatus_to_exitcode(status)})


def _say(owner: socket.socket, message: dict[str, Any]) -> None:
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
