"""Commands of clusters as forks of a process that has imported what they need.

One fork server for each process that runs tests. ``coordinator up`` is a fork of it, and forks its
own server from itself: the rest of a warm start is as ``docs/design/0025-warm-start.md`` has it.
"""

from __future__ import annotations

import atexit
import os
import runpy
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

from psrpc.ops.fork_server import (
    FORK_S,
    FORK_SERVER,
    IMPORT_S,
    MESSAGE_BYTES,
    ForkClient,
    ForkedProcess,
    ForkFailed,
    ForkRequest,
    PendingFork,
    module_of,
    status_in,
)
from psrpc.ops.process import PARENT_PID, child_environment, die_with_parent, module_command

NAME = "tests.e2e.warm"
SERVER = "worker.cli.fork_server"
COORDINATOR = ("coordinator.launch.up", "coordinator.process.serve")
"""Modules that commands of the coordinator import, and a fork server does not."""

WITHOUT_TENSORFLOW = (*COORDINATOR, "pserver.process.shard", "worker.process.run")
"""Modules that commands import before TensorFlow."""

_BEGUN = dict(os.environ)
_IMPORTS = ("GRPC_", "HDF5_", "TF_", "TF2_", "TPU_")
"""Variables that TensorFlow, h5py and our commands set."""


class Fork:
    """A process of the fork server, as ``subprocess.Popen`` is one."""

    def __init__(self, pending: PendingFork) -> None:
        self._control = pending.control
        try:
            self.pid = pending.wait(IMPORT_S)
            pending.go()
        except ForkFailed:
            pending.close()
            raise
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int:
        """Returns the exit status, -N for signal N. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._control], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self.returncode = status_in(self._control.recv(MESSAGE_BYTES))
            self._control.close()
        return self.returncode

    def poll(self) -> int | None:
        """Returns the exit status; None while the process runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Sends a signal; does nothing once the end was reported."""
        if self.poll() is None:
            os.kill(self.pid, number)


def fork(
    module: str, args: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int
) -> Fork:
    """Starts a module, as ``python -m`` does. Raises ForkFailed if the environment would make an
    import differ."""
    command = module_command(module, *args)
    request = ForkRequest(
        __name__,
        command,
        command[3:],
        _environment(environment),
        os.getcwd(),  # noqa: PTH109
        attended=True,
    )
    return Fork(_client().ask(request, stdout, stderr))


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment as the children of ``up`` have it, which forks of a fork share, without what
    imports by tests have set in this process."""
    added = os.environ.items() - _BEGUN.items()
    own = {
        name: value
        for name, value in environment.items()
        if not ((name, value) in added and name.startswith(_IMPORTS))
    }
    return {**child_environment(own), "PYTHONUNBUFFERED": "1"}


@cache
def _client() -> ForkClient:
    return start_server("serve", _environment(os.environ))


def start_server(kind: str, environment: Mapping[str, str]) -> ForkClient:
    """Starts a server, ``serve`` or ``serve-light``, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client = ForkClient(ours)
    with theirs, Path(os.devnull).open("w") as null:
        handles = (theirs.fileno(), null.fileno())
        server = subprocess.Popen(
            module_command(__name__, kind, *map(str, handles)),
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=handles,
        )
    atexit.register(server.wait)
    atexit.register(client.close)
    return client


def fork_without_tensorflow(
    command: Sequence[str],
    stdout: int,
    stderr: int,
    environment: Mapping[str, str],
    client: ForkClient | None = None,
) -> Fork:
    """Starts a module and its arguments, as ``python -m`` does and with no more imported than that
    imports. ``client`` is that of a server ``serve-light`` of the same environment; by default of
    one that all tests share."""
    full = child_environment(environment)
    request = ForkRequest.of(module_command(*command), full, attended=True)
    return Fork((client or _light_client()).ask(request, stdout, stderr))


@cache
def _light_client() -> ForkClient:
    return start_server("serve-light", child_environment(os.environ))


def serve(kind: str) -> None:
    """Serves the descriptors of the command line."""
    from worker.cli import fork_server

    requests, status = map(int, sys.argv[2:])
    die_with_parent()
    if kind == "serve-light":
        fork_server.run_server(requests, status, lambda: None, WITHOUT_TENSORFLOW)
    modules = (*fork_server.PRELOADED, *COORDINATOR)
    fork_server.run_server(requests, status, fork_server.load, modules)


def _offers_a_server() -> None:
    """Offers ``coordinator serve`` a fork server, as ``coordinator up`` does: a fork of this
    process, before it has threads. So a job is described without another import of TensorFlow."""
    from worker.cli import fork_server

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        os.setpgid(0, 0)
        sys.orig_argv = [__name__, "serve"]
        null = os.open(os.devnull, os.O_WRONLY)
        # Of the coordinator, if it has one to die with.
        os.environ.pop(PARENT_PID, None)
        die_with_parent()
        fork_server.run_server(theirs.detach(), null, lambda: None)
    theirs.close()
    ours.set_inheritable(True)
    os.environ[FORK_SERVER] = str(ours.detach())


def _starts_as_forks() -> None:
    """Makes ``coordinator up`` fork its server from itself, which it does before it has threads,
    and ``coordinator serve`` from that server. Shards of every engine are forks of it, too, and
    what ``coordinator export`` runs is one of itself."""
    from coordinator.launch import warm_start
    from worker.cli.forked import Imported, become, open_handles

    def is_warm(command: Sequence[str], run_dir: Path) -> bool:
        return module_of(command) != warm_start.COORDINATOR

    # A fresh shard imports for a second what the server has imported anyway.
    warm_start.is_warm = is_warm

    fresh: Any = subprocess.Popen
    imported = open_handles()

    def start(command: Sequence[str], **options: Any) -> Any:
        if module_of(command) == "coordinator.cli" and options["pass_fds"]:
            with suppress(ForkFailed):
                return _fork_coordinator(command, **options)
        is_export = module_of(command) == "worker.cli" and command[4] == "export"
        if not is_export and module_of(command) != SERVER:
            return fresh(command, **options)
        pid = os.fork()
        if not pid:
            subprocess.Popen = fresh  # type: ignore[misc]
            sys.orig_argv = list(command)
            request = ForkRequest.of(command, options["env"])
            if is_export:
                become(request, Imported(imported, {}), 1, 2)
            os.setpgid(0, 0)
            null = os.open(os.devnull, os.O_WRONLY)
            become(request, Imported(imported | set(options["pass_fds"]), {}), null, null)
        return _Awaited(pid, command)

    subprocess.Popen = start  # type: ignore[assignment, misc]


class _Awaited(ForkedProcess):
    """One for ``subprocess.run`` as well."""

    def __enter__(self) -> _Awaited:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[None, None]:
        self.wait(timeout)
        return None, None


def _fork_coordinator(
    command: Sequence[str], env: Mapping[str, str], stdout: int, pass_fds: Sequence[int], **_: Any
) -> ForkedProcess:
    """Starts a coordinator, which makes its own offer in place of the one that it is given."""
    environment = {name: value for name, value in env.items() if name != FORK_SERVER}
    request = ForkRequest(NAME, command, command[3:], environment, os.getcwd())  # noqa: PTH109
    client = ForkClient(socket.socket(fileno=os.dup(pass_fds[0])))
    with closing(client), client.ask(request, stdout, stdout) as pending:
        process = ForkedProcess(pending.wait(FORK_S), command)
        pending.go()
        return process


if __name__ == "__main__":
    _, module, *arguments = sys.argv
    if module in ("serve", "serve-light"):
        serve(module)
    sys.argv = ["", *arguments]
    if module == "coordinator.cli" and arguments[:1] == ["serve"]:
        _offers_a_server()
    elif module == "coordinator.cli":
        _starts_as_forks()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
