"""Runs a job as a user would, with ``coordinator up``, and brings back the workers' step times."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from benchmarks.memory import MB, available_bytes, cluster_bytes
from benchmarks.steps import Steps, read_steps
from benchmarks.workloads import Dense, Transport
from psrpc.options.locate import security_of_run
from psrpc.security.credentials import Security
from psrpc.security.identity import Role

ROOT = Path(__file__).resolve().parent.parent

LIMIT_S = 600.0
"""Only runs that train to the end take longer."""

STOP_S = 60.0

_ARGUMENTS: dict[Transport, tuple[str, ...]] = {
    "shm": (),
    "tcp": ("--no-shm",),
    "tcp_bf16": ("--no-shm", "--set", "wire_dtype=bfloat16"),
}


def start(arguments: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts ``coordinator``. Tests replace it."""
    # Job files import this package from the working directory.
    return subprocess.Popen(
        [sys.executable, "-m", "coordinator.cli", *arguments],
        cwd=ROOT,
        stdout=output,
        stderr=subprocess.STDOUT,
    )


class RunFailed(Exception):
    """A run gave no figure; the text says why, in one line."""


class Cluster:
    """One run of one job on this machine, in a directory that goes with it. Use it with ``with``:
    whatever happens, no process is left. One thread uses it."""

    def __init__(
        self,
        job: Path | Dense,
        *,
        shards: int = 1,
        workers: int = 1,
        transport: Transport = "shm",
        settings: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        """``settings`` are ``key=value`` for ``--set``; ``options`` come as they are."""
        self._job = job
        self._shards = shards
        self._workers = workers
        self._options = [*_ARGUMENTS[transport], *options]
        self._options += [word for setting in settings for word in ("--set", setting)]
        self._folder = Path()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Cluster:
        """Raises RunFailed: a dense job needs more memory than there is."""
        if isinstance(self._job, Dense):
            _check_memory(self._job, self._shards, self._workers)
        self._folder = Path(tempfile.mkdtemp(prefix="bench-"))
        job = self._job
        if isinstance(job, Dense):
            job = write_job(self._folder / "dense.py", job)
        command = ["up", str(job), "--shards", str(self._shards), "--workers", str(self._workers)]
        command += ["--run-dir", str(self.run_dir), "--step-times", "--gpu", "none"]
        with self._output.open("wb") as output:
            self._process = start([*command, *self._options], output)
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    @property
    def run_dir(self) -> Path:
        """The run directory; gone after the block."""
        return self._folder / "run"

    @property
    def _output(self) -> Path:
        return self._folder / "output"

    def wait(self, limit_s: float = LIMIT_S) -> list[Steps]:
        """The steps of every worker, when the job is done.

        Raises:
            RunFailed: it failed, or took longer than ``limit_s``.
        """
        assert self._process is not None
        try:
            status = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"not done after {limit_s:.0f} s") from None
        if status:
            said = self._output.read_text(errors="replace").strip().splitlines()
            raise RunFailed(said[-1] if said else f"exit status {status}")
        return read_steps(self.run_dir / "steps")

    def stop(self) -> None:
        """Ends the job, which leaves its step times; nothing happens if it has ended."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                # Its children go when it goes.
                self._process.send_signal(signal.SIGKILL)
                self._process.wait(STOP_S)

    @property
    def running(self) -> bool:
        """Whether the job has not ended yet."""
        assert self._process is not None
        return self._process.poll() is None

    def security(self, role: Role = Role.OPERATOR) -> Security:
        """To talk to its processes, once :meth:`address` has answered."""
        return security_of_run(self.run_dir, role)

    def address(self) -> str:
        """Of the coordinator, once it serves.

        Raises:
            RunFailed: the job ended before.
        """
        file = self.run_dir / "address"
        while self.running:
            if file.exists() and (text := file.read_text().strip()):
                return text
            time.sleep(0.05)
        self.wait()
        raise RunFailed("the job ended before it was looked at")

    def processes(self, command: str) -> list[int]:
        """Process ids of this run's ``pserver`` or ``worker`` processes, in order of starting."""
        assert self._process is not None
        found = []
        for proc in Path("/proc").glob("[0-9]*"):
            try:
                line = (proc / "cmdline").read_bytes().replace(b"\0", b" ").split()
                parent = (proc / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if f"{command}.cli".encode() in line and int(parent) == self._process.pid:
                found.append(int(proc.name))
        return sorted(found)


def write_job(path: Path, dense: Dense) -> Path:
    """Writes the job file of a dense workload, and returns its path."""
    path.write_text(
        "from benchmarks.dense_job import dense_job\n"
        "from benchmarks.workloads import Dense\n\n"
        f"job = dense_job({dense})\n"
    )
    return path


def _check_memory(dense: Dense, shards: int, workers: int) -> None:
    """Refuses a run that could make the machine swap, or the kernel kill another process."""
    needed, available = cluster_bytes(dense.nbytes, shards, workers), available_bytes()
    if needed > available:
        raise RunFailed(
            f"not run: needs about {needed // MB} MB of memory, {available // MB} MB are free"
        )
