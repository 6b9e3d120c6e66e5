"""Starts and ends the processes of a local cluster, for the caller of ``fit``."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from psrpc.core.errors import JobFailed
from psrpc.ops.exit_status import INTERRUPTED
from psrpc.ops.host_requests import HostRequest, PartsRequest, UpRequest, encode_request
from psrpc.ops.process import child_environment, module_command

LEAVE_S = 15.0
"""Seconds that the processes may take to end after the caller has closed the cluster."""

_TO_FILES = {"TTY_COMPATIBLE": "0", "TTY_INTERACTIVE": "0"}
"""Variables for rich, whose output goes to a file: a notebook's kernel sets ``FORCE_COLOR``, which
would make rich draw as on a terminal."""

_DASHBOARD = re.compile(r"dashboard (https?://\S+)")

STOP_S = 120.0
"""Seconds that a job may take to stop, which includes a checkpoint."""


class Host:
    """The process that runs one job or prediction after the other. It ends when its standard input
    closes. This process holds the other end, so the cluster ends even if this process is killed.

    Not thread-safe, except for :meth:`close`.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Starts the process, which begins to import TensorFlow."""
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        try:
            self._process = subprocess.Popen(
                module_command("coordinator.launch.host", str(requests), str(replies)),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**child_environment(environment), **_TO_FILES},
                pass_fds=(requests, replies),
                # Ctrl-C is for the caller alone, which decides what it means.
                start_new_session=True,
            )
        finally:
            os.close(requests)
            os.close(replies)
        self._closed = threading.Lock()
        atexit.register(self.close)
        _hosts.add(self)

    @property
    def pid(self) -> int:
        """The process id of the host."""
        return self._process.pid

    def up(self, arguments: Sequence[str], output: Path) -> HostRun:
        """Starts ``coordinator up``; the previous run must have ended. Raises JobFailed if the host
        is gone."""
        return self._run(UpRequest(list(arguments), str(output)), output)

    def parts(self, folder: Path, count: int, output: Path) -> HostRun:
        """Starts the processes of a prediction, as :meth:`up` does."""
        return self._run(PartsRequest(str(folder), count, str(output)), output)

    def _run(self, request: HostRequest, output: Path) -> HostRun:
        try:
            os.write(self._requests, encode_request(request).encode())
        except BrokenPipeError:
            raise JobFailed(
                "the processes of the cluster are gone; enter the cluster anew"
            ) from None
        return HostRun(self._process.pid, self._replies, output)

    def let_go(self) -> bool:
        """Closes the pipes that keep the cluster alive; returns False if that was done before."""
        if not self._closed.acquire(blocking=False):
            return False
        atexit.unregister(self.close)
        os.close(self._requests)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        return True

    def close(self) -> None:
        """Ends all processes of the cluster. May be repeated."""
        if not self.let_go():
            return
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            # Its children die with it.
            self._process.kill()
            self._process.wait()
        os.close(self._replies)


_hosts: weakref.WeakSet[Host] = weakref.WeakSet()


def _let_all_go() -> None:
    for host in _hosts:
        host.let_go()


# A forked child, such as one of multiprocessing, may outlive a caller that is killed; if it held
# the pipes, the cluster would not end.
os.register_at_fork(after_in_child=_let_all_go)


class HostRun:
    """A run of ``coordinator up``, or of the parts of a prediction, in the host."""

    def __init__(self, host: int, replies: int, output: Path) -> None:
        self._host = host
        self._output = output
        self._status: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._listen, args=(replies,), name="up", daemon=True).start()

    def _listen(self, replies: int) -> None:
        said = b""
        with contextlib.suppress(OSError):
            while not said.endswith(b"\n") and (more := os.read(replies, 16)):
                said += more
        self._status = int(said) if said.endswith(b"\n") else -signal.SIGKILL
        self._ended.set()

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._status

    @property
    def output(self) -> str:
        """Everything that it has printed so far."""
        try:
            return self._output.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    @property
    def dashboard(self) -> str:
        """The address of the dashboard; empty before it is known and after the end."""
        found = _DASHBOARD.search(self.output)
        return found[1] if found and self._status is None else ""

    @property
    def last_line(self) -> str:
        """The last line about the state of the job, without its time; after the end, the result."""
        if self._status is not None:
            return self.why() if self._status else "done"
        lines = re.findall(r"(?m)^\[ *[\d.]+ s\] (.*)$", self.output)
        return str(lines[-1]).strip() if lines else "starting"

    def wait(self, seconds: float) -> int | None:
        """Waits up to ``seconds`` for the end; returns the exit status, None if it still runs."""
        self._ended.wait(seconds)
        return self._status

    def stop(self) -> None:
        """Stops the job: work under way is finished and saved. A second call ends it at once."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._host, signal.SIGINT)

    def end(self) -> None:
        """Ends the run now if it has not ended. Raises JobFailed if it does not end."""
        for _ in range(2):
            self.stop()
            if self.wait(LEAVE_S) is not None:
                return
        raise JobFailed(f"the processes of the cluster do not end; see {self._output.parent}/logs")

    def why(self) -> str:
        """Returns why the run failed, from its output."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error ")]
        if errors:
            return errors[-1].removeprefix("error ")
        if self._status == INTERRUPTED:
            return "the run was stopped"
        return lines[-1] if lines else f"coordinator up ended with status {self._status}"
