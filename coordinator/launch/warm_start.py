"""Starts processes of ``coordinator up`` as forks of one that has imported TensorFlow.

See ``docs/design/0025-warm-start.md``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from psrpc.core.document import anything, mapped
from psrpc.core.errors import InvalidJob
from psrpc.core.names import JOB
from psrpc.core.text import sanitize
from psrpc.files.storage import read_json
from psrpc.ops.fork_server import (
    FORK_S,
    FORK_SERVER,
    IMPORT_S,
    ForkClient,
    ForkedProcess,
    ForkFailed,
    ForkRequest,
    ForkServerLost,
    module_of,
)
from psrpc.ops.process import module_command

WORKER, SHARD, COORDINATOR = "worker.cli", "pserver.cli", "coordinator.cli"
PART = "worker.predict.part"

_READY = "ready"
_STATUS_BYTES = 1024
_PR_SET_CHILD_SUBREAPER = 36


class ChildProcess(Protocol):
    """A process, fresh or forked, as the supervisor uses it; ``subprocess.Popen`` is one."""

    pid: int

    def wait(self) -> int:
        """Waits for the end and returns the exit status, -N for signal N."""
        ...


Launch = Callable[[Sequence[str], Mapping[str, str], int], ChildProcess]
"""Starts a process: its command line, its environment, and the descriptor of its output."""


class ForkSource(Protocol):
    """Starts the processes of one cluster; see :class:`WarmStart`."""

    def waits(self, command: Sequence[str], run_dir: Path) -> bool: ...

    def start_process(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        run_dir: Path,
        note: Callable[[str], object],
    ) -> ChildProcess: ...

    def reap(self, known: Collection[int]) -> None: ...


def start_fresh(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: int,
    pass_fds: Collection[int] = (),
) -> ChildProcess:
    """Starts a program in a process group of its own. Raises OSError."""
    return subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        process_group=0,
        pass_fds=pass_fds,
    )


class WarmStart:
    """The fork server of a run and its state: off, importing or ready. Not thread-safe.

    A process that cannot be forked starts fresh, and a note says why, once per reason. From
    :meth:`start` to :meth:`stop`, this process is a child subreaper: forks become its children,
    and so do orphaned descendants, which :meth:`reap` reaps.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        command: Sequence[str] = (),
        *,
        limit_s: float = IMPORT_S,
    ) -> None:
        """``environment`` is that of the fork server; ``command`` starts another server, for
        tests."""
        self._environment = environment
        self._command = command or module_command("worker.cli.fork_server")
        self._limit_s = limit_s
        self._server: subprocess.Popen[bytes] | None = None
        self._client: ForkClient | None = None
        self._status = -1
        self._deadline = 0.0
        self._why_off = ""
        self._told: set[str] = set()
        self._reaps = False
        self.ready = False
        """Whether the server has imported TensorFlow; see :meth:`look`."""

    @property
    def client(self) -> ForkClient | None:
        """The client of the server; None without one."""
        return self._client

    def __enter__(self) -> WarmStart:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the server, which imports TensorFlow in the background. Raises nothing: without a
        server, processes start fresh."""
        if sys.platform != "linux":
            self._why_off = f"forks need Linux, and this is {sys.platform}"
            return
        if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            self._why_off = "this process cannot become a child subreaper"
            return
        self._reaps = True
        try:
            self._start_server()
        except OSError as error:
            self._turn_off(f"the fork server cannot start: {error.strerror}")

    def _start_server(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._client = ForkClient(ours)
        self._status, status = os.pipe()
        os.set_blocking(self._status, False)
        self._deadline = time.monotonic() + self._limit_s
        handles = (theirs.fileno(), status)
        try:
            self._server = subprocess.Popen(
                [*self._command, *map(str, handles)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(self._environment),
                process_group=0,
                pass_fds=handles,
            )
        finally:
            os.close(status)
            theirs.close()

    @property
    def pid(self) -> int:
        """The server's process id; 0 without one."""
        return 0 if self._server is None else self._server.pid

    def look(self) -> None:
        """Finds out whether the server is ready or has ended."""
        if self._server is None:
            return
        if not self.ready:
            with contextlib.suppress(BlockingIOError):
                said = os.read(self._status, _STATUS_BYTES).decode(errors="replace")
                self.ready = said == _READY
                if said and not self.ready:
                    self._turn_off(sanitize(said))
        if self._server is not None and self._server.poll() is not None:
            self._turn_off(f"the fork server has ended with status {self._server.returncode}")
        elif not self.ready and time.monotonic() > self._deadline:
            self._turn_off(f"the fork server did not import TensorFlow within {self._limit_s:g} s")

    def waits(self, command: Sequence[str], run_dir: Path) -> bool:
        """Whether a process should wait until the server has imported TensorFlow: a fresh process
        would begin the same import later."""
        self.look()
        return self._server is not None and not self.ready and is_warm(command, run_dir)

    def start_process(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        run_dir: Path,
        note: Callable[[str], object],
    ) -> ChildProcess:
        """Starts a process, as a fork if it needs TensorFlow and the server is ready; its output
        goes to the descriptor ``output``.

        Raises:
            OSError: the program cannot be started.
        """
        self.look()
        if module_of(command) == COORDINATOR and self._client is not None:
            offer = self._client.fileno()
            return start_fresh(
                command, {**environment, FORK_SERVER: str(offer)}, output, pass_fds=(offer,)
            )
        if is_warm(command, run_dir):
            if self._client is not None and self.ready:
                try:
                    return self._fork(self._client, command, environment, output)
                except ForkServerLost as error:
                    self._turn_off(str(error))
                except ForkFailed as error:
                    self._tell(note, f"a process starts without warm start: {error}")
            if self._why_off:
                self._tell(note, f"processes start without warm start: {self._why_off}")
        return start_fresh(command, environment, output)

    def _fork(
        self,
        client: ForkClient,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int,
    ) -> ChildProcess:
        with client.ask(ForkRequest.of(command, environment), output, output) as pending:
            process = ForkedProcess(pending.wait(FORK_S), command)
            pending.go()
            return process

    def _tell(self, note: Callable[[str], object], line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            note(line)

    def reap(self, known: Collection[int]) -> None:
        """Reaps ended children of this process that are neither the server nor ``known``: forks
        that other clients asked for, and orphaned descendants."""
        if not self._reaps:
            return
        self.look()
        with contextlib.suppress(ChildProcessError):
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while (ended := os.waitid(os.P_ALL, 0, options)) is not None:
                if ended.si_pid in known or ended.si_pid == self.pid:
                    return
                os.waitpid(ended.si_pid, os.WNOHANG)

    def stop(self) -> None:
        """Ends the server; from now on, init adopts orphans again."""
        self._turn_off("")
        if self._reaps:
            self.reap(())
            self._reaps = False
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _turn_off(self, why: str) -> None:
        self._why_off = why
        self.ready = False
        server, self._server = self._server, None
        if server is not None:
            # The server has no state to save. A fork under way ends when its control socket closes.
            server.kill()
            server.wait()
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._status >= 0:
            os.close(self._status)
            self._status = -1


def is_warm(command: Sequence[str], run_dir: Path) -> bool:
    """Whether a process needs TensorFlow: workers, parts of a prediction, and shards with the Keras
    engine do."""
    module = module_of(command)
    return module in (WORKER, PART) or (module == SHARD and engine_of(run_dir) == "keras")


def engine_of(run_dir: Path) -> str:
    """Returns the update engine of the run, which its coordinator has stored; empty if unknown."""
    try:
        description = mapped(anything)(read_json(run_dir / JOB), "")["description"]
        return str(mapped(anything)(description, "")["engine"])
    except (OSError, ValueError, KeyError, InvalidJob):
        return ""
