"""One process of a cluster inside a Ray actor, which looks after it on its node."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.launch.children import Children
from coordinator.launch.commands import cluster_environment
from psrpc.ops.process import module_command, on_stop_signals

GRACE_S = 90.0
"""How long a process may drain before it is killed: docs/supervisors.md."""

LOOK_S = 1.0
"""How long a look waits at most. Other calls wait for it, since the actor has one thread."""

POLL_S = 0.1

SHARED_S = 5.0
"""How long a file that another node has just written may take to show up on a shared disk."""

WORDS = 15
"""Number of last lines of output in a `ProcessEnd`."""

_TELL_S = 0.5
"""How long a leaving actor lives on after its last answer, so that the answer arrives."""


@dataclass(frozen=True)
class NodeVisit:
    """The node of an actor.

    Attributes:
        host: its IP address, which the other nodes reach.
        unseen: the requested paths that the node does not see.
    """

    host: str
    unseen: tuple[str, ...]


@dataclass(frozen=True)
class ProcessEnd:
    """One ended life of a process.

    Attributes:
        status: the exit status; -N when signal N killed it.
        how: in words, such as "ended with exit status 1, see LOG".
        words: its last lines that are no structured log.
    """

    status: int
    how: str
    lived_s: float = 0.0
    words: tuple[str, ...] = ()


class ProcessKeeper:
    """Runs one process at a time. It is an actor with one thread, the main one, which signal
    handlers need.

    The process dies with the actor. At SIGTERM the actor drains the process before it exits itself.
    """

    def __init__(self, name: str) -> None:
        """``name`` is that of the process, such as ``"worker-a"``."""
        self._name = name
        self._children = Children()
        self._log = ""
        self._began = 0.0
        self._kill_at: float | None = None
        self._leaving = False
        on_stop_signals(lambda _number: self._leave())

    def visit(self, directory: str, paths: Sequence[str]) -> NodeVisit:
        """Changes to ``directory`` if this node has it, and looks for ``paths``."""
        import ray

        if Path(directory).is_dir():
            os.chdir(directory)
        deadline = time.monotonic() + SHARED_S
        while unseen := tuple(path for path in paths if not Path(path).exists()):
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
        return NodeVisit(ray.util.get_node_ip_address(), unseen)

    def start(
        self, module: str, arguments: Sequence[str], log: str, environment: Mapping[str, str]
    ) -> ProcessEnd | None:
        """Starts a process; returns as `look` does.

        Args:
            log: the file that its output is appended to.
            environment: variables to add to those of the actor.

        Raises:
            OSError: the program or the log cannot be opened.
        """
        common = cluster_environment({**os.environ, **environment})
        command = module_command(module, *arguments, "--die-with-parent")
        self._log, self._began, self._kill_at = log, time.monotonic(), None
        self._children.start(self._name, command, Path(log), common)
        return self.look()

    def look(self) -> ProcessEnd | None:
        """Waits a second at most for the end of the process; returns None if it still runs."""
        if self._leaving and self._kill_at is None:
            self.stop(GRACE_S)
        ended = self._children.wait(LOOK_S)
        if not ended and self._kill_at is not None and time.monotonic() >= self._kill_at:
            ended = self._children.kill()
        if not ended:
            return None
        if self._leaving:
            threading.Timer(_TELL_S, os._exit, (1,)).start()
        [exited] = ended
        words = tuple(exited.words()[-WORDS:])
        how = f"ended with {exited.how()}, see {self._log}"
        return ProcessEnd(exited.status, how, time.monotonic() - self._began, words)

    def stop(self, grace_s: float) -> None:
        """Sends the process SIGTERM; `look` kills it if it still runs ``grace_s`` seconds later."""
        self._children.send(self._name, signal.SIGTERM)
        self._kill_at = time.monotonic() + grace_s

    def _leave(self) -> None:
        """Makes this actor exit once its process has ended, so that Ray starts the actor elsewhere;
        called on a thread of its own."""
        self._leaving = True
        if not self._children.alive():
            os._exit(1)
