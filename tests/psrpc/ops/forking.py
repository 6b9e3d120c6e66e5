"""A fork server that imports nothing, and what it is asked to run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from psrpc.ops.fork_server import ForkClient, ForkRequest, PendingFork
from psrpc.ops.process import child_environment, module_command

LONG_S = 60.0
"""Far above what any of this takes; a test that waits so long has failed."""

COMMAND = [sys.executable, "-c", "import tests.psrpc.ops.forking as f; f.serve()"]
"""The server's command line without its descriptors, see :func:`serve`."""


def serve() -> None:
    """Serves the descriptors of the command line as the fork server does, without its imports."""
    from worker.cli.fork_server import run_server

    requests, status = map(int, sys.argv[1:3])
    broken = os.environ.get("BREAKS", "")

    def imports() -> None:
        if broken == "import":
            raise ImportError("no such library\nsecond line")
        if broken == "fork":
            os.fork = _refuses
        if broken == "second fork":
            os.fork = _Second(os.fork)
        if broken == "slow":
            Path(os.environ["GATE"]).read_text()

    run_server(requests, status, imports)


def _refuses() -> int:
    raise BlockingIOError(11, "Resource temporarily unavailable")


class _Second:
    """Forks the first time; the fork refuses."""

    def __init__(self, fork: object) -> None:
        self._fork = fork

    def __call__(self) -> int:
        fork, self._fork = self._fork, _refuses
        return fork()  # type: ignore[no-any-return, operator]


@dataclass
class BareServer:
    """A running server, its client, and the environment that it began with."""

    client: ForkClient
    process: subprocess.Popen[bytes]
    environment: Mapping[str, str]
    output: Path
    held: ExitStack = field(default_factory=ExitStack)

    def ask(self, code: str, **changes: str) -> PendingFork:
        """Asks for an attended process that runs ``code``."""
        return self.ask_for(self.request(code, **changes))

    def request(self, code: str, **changes: str) -> ForkRequest:
        command = module_command("tests.psrpc.ops.forked", code)
        return ForkRequest.of(command, {**self.environment, **changes}, attended=True)

    def ask_for(self, request: ForkRequest) -> PendingFork:
        with self.output.open("ab") as output:
            return self.client.ask(request, output.fileno(), output.fileno())


@contextmanager
def bare_server(folder: Path, **environment: str) -> Iterator[BareServer]:
    """Runs a server that is ready, or has told why it will not be."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    status, told = os.pipe()
    found = child_environment({**os.environ, "PYTHONPATH": str(Path.cwd()), **environment})
    handles = (theirs.fileno(), told)
    command = [*COMMAND, *map(str, handles)]
    client = ForkClient(ours)
    with subprocess.Popen(
        command, env=found, pass_fds=handles, stdin=subprocess.DEVNULL
    ) as process:
        os.close(told)
        theirs.close()
        try:
            with open(status, encoding="utf-8") as words:  # noqa: PTH123
                said = words.read()
            assert said == "ready", said
            yield BareServer(client, process, found, folder / "output")
        finally:
            client.close()
            process.wait(LONG_S)
