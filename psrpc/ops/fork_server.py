"""The client of the fork server, which has imported TensorFlow and forks processes that need it.

A request is one byte on a socket that all clients share, with four descriptors: a file that holds
the request as JSON, the control socket of the new process, its standard output and its standard
error. The new process, or the server if it cannot fork, answers on the control socket. The process
then waits there until the client sends :data:`GO`, and ends if the client closes the socket
instead. So a client that has given up never gets a late process. The server itself is
``worker.cli.fork_server``.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass

FORK_SERVER = "PSRPC_FORK_SERVER"
"""Environment variable with the descriptor of the clients' socket, for a child that inherits it."""

GO = b"go"
MESSAGE_BYTES = 4096
"""Maximum size of a message on a control socket."""

FORK_S = 10.0
"""How long a client waits for a fork of a server that has imported everything."""

IMPORT_S = 120.0
"""How long a client waits for the server to import TensorFlow."""


class ForkFailed(Exception):
    """The fork server started no process; the message says why. The caller may start a fresh
    process instead."""


class ForkServerLost(ForkFailed):
    """The fork server does not answer, and will not answer later requests either."""


@dataclass(frozen=True)
class ForkRequest:
    """A process to fork.

    Attributes:
        module: the module that ``python -m`` would run.
        command: the whole command line of a fresh process; ``ps`` shows it for the fork, too.
        arguments: the arguments of ``module``.
        group: the process group to join; 0 for one of its own.
        attended: whether the control socket reports the exit status. If not, the process becomes a
            child of the server's parent, which must be a child subreaper.
    """

    module: str
    command: Sequence[str]
    arguments: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    group: int = 0
    attended: bool = False

    @classmethod
    def of(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        group: int = 0,
        attended: bool = False,
    ) -> ForkRequest:
        """Makes the request for a command of :func:`psrpc.ops.process.module_command`."""
        module, arguments = module_of(command), list(command[_WORDS:])
        assert module, command
        where = os.getcwd()  # noqa: PTH109  # Path.cwd() is the same
        return cls(module, list(command), arguments, dict(environment), where, group, attended)

    def encode(self) -> bytes:
        """Returns the request as JSON, which keeps undecodable bytes of the environment."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> ForkRequest:
        """Reverses :meth:`encode`."""
        return cls(**json.loads(data))


_WORDS = 4
"""Number of words in a command before the arguments of its module."""


def module_of(command: Sequence[str]) -> str:
    """Returns the module of a command line of :func:`psrpc.ops.process.module_command`; empty for
    any other."""
    return command[3] if list(command[1:3]) == ["-P", "-m"] and len(command) >= _WORDS else ""


class ForkClient:
    """Asks a fork server for processes. Not thread-safe; other processes may share the socket."""

    def __init__(self, requests: socket.socket) -> None:
        """Takes over ``requests``, a connected SOCK_SEQPACKET socket."""
        self._requests = requests
        # So that a full queue raises an error: nothing here may wait without a deadline.
        requests.setblocking(False)

    @classmethod
    def inherited(cls, environment: MutableMapping[str, str]) -> ForkClient | None:
        """Returns the client of the server that the parent process offers in ``environment``; None
        if it offers none. Removes the offer from ``environment``, because children do not inherit
        the socket."""
        handle = environment.pop(FORK_SERVER, "")
        if not handle.isdecimal():
            return None
        try:
            os.set_inheritable(int(handle), False)
            return cls(socket.socket(fileno=int(handle)))
        except OSError:
            return None

    def fileno(self) -> int:
        """Returns the descriptor, for a child that inherits it."""
        return self._requests.fileno()

    def close(self) -> None:
        """Closes this process's end of the socket. The server ends when no process has it open any
        more."""
        self._requests.close()

    def ask(self, request: ForkRequest, stdout: int, stderr: int) -> PendingFork:
        """Sends a request. The caller still has to close ``stdout`` and ``stderr``.

        Raises:
            ForkServerLost: the server has ended, or does not take requests.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, os.fdopen(os.memfd_create("fork-request"), "w+b") as file:
                file.write(request.encode())
                file.flush()
                handles = [file.fileno(), theirs.fileno(), stdout, stderr]
                socket.send_fds(self._requests, [b"\0"], handles)
        except OSError as error:
            ours.close()
            raise ForkServerLost(f"the fork server takes no request: {error.strerror}") from None
        return PendingFork(ours)


class PendingFork:
    """A requested process, which waits for :meth:`go`. Closing it before that ends the process."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        """The control socket, non-blocking. Pass its first message to :meth:`accept`."""
        control.setblocking(False)

    def __enter__(self) -> PendingFork:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the control socket."""
        self.control.close()

    def wait(self, seconds: float) -> int:
        """Returns the process id of the new process.

        Raises:
            ForkFailed: the server refuses.
            ForkServerLost: the server has ended, or does not answer within ``seconds``.
        """
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        if not poll.poll(seconds * 1000):
            raise ForkServerLost(f"the fork server did not answer within {seconds:g} s")
        return self.accept(_received(self.control))

    def accept(self, message: bytes) -> int:
        """Returns the process id in the first message; see :meth:`wait` for errors."""
        if not message:
            raise ForkServerLost("the fork server has ended")
        answer = json.loads(message)
        if "pid" not in answer:
            raise ForkFailed(answer.get("error", "the new process has ended"))
        return int(answer["pid"])

    def go(self) -> None:
        """Lets the process run.

        Raises:
            ForkFailed: the process has ended meanwhile.
        """
        try:
            self.control.send(GO)
        except OSError as error:
            raise ForkFailed(f"the new process has ended: {error.strerror}") from None


def _received(control: socket.socket) -> bytes:
    try:
        return control.recv(MESSAGE_BYTES)
    except ConnectionError:
        return b""


def status_in(message: bytes) -> int:
    """Returns the exit status in the last message of an attended process, -N for signal N. If the
    message is empty, returns the status of SIGKILL, since a process killed by that cannot report
    it."""
    return int(json.loads(message)["status"]) if message else -signal.SIGKILL


class ForkedProcess:
    """A fork that is a child of this process, with the interface of ``subprocess.Popen``."""

    POLL_S = 0.01

    def __init__(self, pid: int, command: Sequence[str]) -> None:
        self.pid = pid
        self.args = command
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit status, -N for signal N; None while the process runs."""
        return self._waited(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit status.

        Raises:
            subprocess.TimeoutExpired: the process has not ended within ``timeout`` seconds.
        """
        if timeout is None:
            status = self._waited(0)
            assert status is not None
            return status
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(self.POLL_S)
        return status

    def _waited(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal; does nothing after the exit status was read. Until then the system does
        not reuse the process id, so no other process can get the signal."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)
