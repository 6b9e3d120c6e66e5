"""A cluster of shells in a directory, for the supervisor."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator.launch.commands import ClusterCommands, Command
from coordinator.launch.restarts import Outcome
from coordinator.launch.supervisor import Supervisor
from psrpc.ops.retry import Announcer
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1.coordinator_pb2_grpc import (
    CoordinatorServicer,
)


class Status(CoordinatorServicer):
    """Answers GetJobStatus with whatever ``now`` is, while ``answers`` is set."""

    def __init__(self) -> None:
        self.now = pb.GetJobStatusResponse(job="job", phase="training")
        self.answers = threading.Event()
        self.answers.set()
        self.left: list[pb.RevokeWorkerRequest] = []
        self.has_left = threading.Event()
        self.silent_since: float | None = None
        """Monotonic seconds from which on nothing was heard of any shard."""

    def GetJobStatus(  # noqa: N802
        self, request: pb.GetJobStatusRequest, context: Any
    ) -> pb.GetJobStatusResponse:
        assert self.answers.wait(60)
        if self.silent_since is None:
            return self.now
        silent = pb.GetJobStatusResponse()
        silent.CopyFrom(self.now)
        for shard in silent.shards:
            shard.silent_s = time.monotonic() - self.silent_since
        return silent

    def RevokeWorker(  # noqa: N802
        self, request: pb.RevokeWorkerRequest, context: Any
    ) -> pb.RevokeWorkerResponse:
        # A message is never changed while it may be on its way out.
        now = pb.GetJobStatusResponse()
        now.CopyFrom(self.now)
        for worker in now.workers:
            if worker.worker == request.worker:
                worker.state = "left"
        self.now = now
        self.left.append(request)
        self.has_left.set()
        return pb.RevokeWorkerResponse()


class Notes:
    """A screen that remembers, and lets a test wait for a word."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.shown: list[str] = []
        self.closed = False
        self.when_shown: Callable[[], None] | None = None
        self._changed = threading.Condition()
        self._announcer = Announcer(lambda what, _waited_s: self.note(f"waiting for {what}"))

    def show(self, status: pb.GetJobStatusResponse) -> None:
        with self._changed:
            self.shown.append(status.phase)
            self._changed.notify_all()
        if self.when_shown is not None:
            self.when_shown()
            self.when_shown = None

    def note(self, line: str) -> None:
        with self._changed:
            self.notes.append(line)
            self._changed.notify_all()

    def waiting(self, what: str, now: float) -> None:
        if what:
            self._announcer.waiting(what, now)
        else:
            self._announcer.over()

    def close(self) -> None:
        self.closed = True

    def wait_for(self, word: str) -> None:
        """Until a note has that word, or a status that phase was shown."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: word in self.shown or any(word in line for line in self.notes), timeout=60
            )


class ShellCluster:
    """A cluster of shells in a directory, which FIFOs hold."""

    def __init__(self, folder: Path, address: str, status: Status) -> None:
        self.folder = folder
        self.address = address
        self.status = status
        self.screen = Notes()
        self.members: dict[str, str] = {}
        self.coordinator = self.serving("read line < never; exit 0")
        for name in ("never", "gate", "end"):
            self.fifo(name)

    def serving(self, script: str) -> str:
        return f"echo {self.address} > address.tmp; mv address.tmp address; {script}"

    def supervisor(self, max_restarts: int = 10) -> Supervisor:
        def command(script: str) -> Command:
            return Command(["/bin/sh", "-c", f"cd {self.folder}; {script}"], os.environ)

        members = {name: command(script) for name, script in self.members.items()}
        cluster = ClusterCommands(self.address, command(self.coordinator), members)
        return Supervisor(cluster, self.folder, self.screen, max_restarts)

    def run(self, max_restarts: int = 10) -> Outcome:
        outcome = self.supervisor(max_restarts).run()
        assert self.screen.closed
        return outcome

    @contextmanager
    def running(self, max_restarts: int = 10) -> Iterator[list[Outcome]]:
        """Runs it meanwhile; the outcome is in the list in the end."""
        self.started = supervisor = self.supervisor(max_restarts)
        outcomes: list[Outcome] = []
        thread = threading.Thread(target=lambda: outcomes.append(supervisor.run()))
        thread.start()
        try:
            yield outcomes
        except BaseException:
            supervisor.stop()
            supervisor.stop()
            raise
        finally:
            thread.join()

    def fifo(self, name: str) -> Path:
        os.mkfifo(self.folder / name)
        return self.folder / name

    def write_summary(self, **values: object) -> str:
        """A script that does."""
        return f"echo '{json.dumps(values)}' > new.json; mv new.json summary.json"

    @property
    def gate(self) -> Path:
        return self.folder / "gate"

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"


WAITS = "read line < never"
STAYS = "read x < end"
"""To the end of the job, which the coordinator tells it."""
ENDS = "read x < gate; echo x > end; exit 0"
TWICE = "if test -e been; then {second}; else touch been; {first}; fi"
"""What a process does the first time, and what from then on."""
