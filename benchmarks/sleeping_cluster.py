"""A coordinator, shards and workers that sleep: how fast a policy lets them train."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import ROOT, RunFailed
from benchmarks.processor import cpu_s
from coordinator.client.client import CoordinatorClient
from psrpc.core.errors import PsError
from psrpc.ops.process import child_environment
from psrpc.v1 import coordinator_pb2 as pb

JOB = ROOT / "benchmarks" / "jobs" / "sleeping.py"

START_S = 120.0
STOP_S = 20.0
TICK_S = 0.05


@dataclass(frozen=True)
class Rate:
    """Rates between two looks at a cluster.

    Attributes:
        examples_per_s: those that count: done, and never counted twice.
        status: at the end.
        cores: that the processes of each module used.
    """

    examples_per_s: float
    status: pb.GetJobStatusResponse
    cores: Mapping[str, float]


class SleepingCluster:
    """Processes on this machine that go when the block ends. One thread uses it."""

    def __init__(
        self,
        settings: Sequence[str],
        example_s: float,
        slow_downs: Sequence[float],
        shards: int = 1,
        together: int = 1,
    ) -> None:
        """Args:
        settings: ``key=value`` of the job.
        example_s: seconds of sleep for an example.
        slow_downs: one worker each, so many times as slow.
        together: workers of one process, which are all as slow as its first one.
        """
        self._settings = settings
        self._shards = shards
        self._together = together
        self._example_s = example_s
        self._slow_downs = slow_downs
        self._folder = tempfile.TemporaryDirectory(prefix="sleeping-", ignore_cleanup_errors=True)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._modules: list[str] = []
        self._client: CoordinatorClient | None = None

    def __enter__(self) -> SleepingCluster:
        """Starts everybody; raises RunFailed if the coordinator does not come up."""
        try:
            self._start_all()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start_all(self) -> None:
        sets = [word for setting in self._settings for word in ("--set", setting)]
        self._start(
            "coordinator.cli",
            *("serve", "--job", str(JOB), "--run-dir", str(self._run_dir)),
            *("--bind", "127.0.0.1:0", "--shards", str(self._shards), "--die-with-parent", *sets),
        )
        address = self._address()
        where = ("--coordinator", address)
        for shard in range(self._shards):
            self._start(
                "pserver.cli",
                *("serve", "--shard", str(shard), "--bind", "127.0.0.1:0", "--die-with-parent"),
                *where,
            )
        for first in range(0, len(self._slow_downs), self._together):
            mine = self._slow_downs[first : first + self._together]
            self._start(
                "benchmarks.sleeping_worker",
                *(*where, "--example-s", str(self._example_s), "--slow-down", str(mine[0])),
                *("--count", str(len(mine))),
            )
        self._client = CoordinatorClient(address)

    def __exit__(self, *exception: object) -> None:
        if self._client is not None:
            self._client.close()
        # Nothing of this run is of use any more, so no process needs to save it.
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(STOP_S)
        self._folder.cleanup()

    def measure(self, warmup_s: float, seconds: float) -> Rate:
        """How fast all workers together train, ``warmup_s`` after all of them have begun.

        Raises:
            RunFailed: a process ended, or did not begin.
        """
        self._await_workers()
        time.sleep(warmup_s)
        began, first, before = time.monotonic(), self._status(), self._cpu_s()
        time.sleep(seconds)
        ended, last = time.monotonic(), self._status()
        took_s = ended - began
        cores = {module: (cpu - before[module]) / took_s for module, cpu in self._cpu_s().items()}
        return Rate((last.examples - first.examples) / took_s, last, cores)

    def _cpu_s(self) -> dict[str, float]:
        """Processor seconds by module."""
        used = dict.fromkeys(self._modules, 0.0)
        for module, process in zip(self._modules, self._processes, strict=True):
            used[module] += cpu_s(process.pid)
        return used

    def _await_workers(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with suppress(PsError):
                status = self._status()
                trained = [worker for worker in status.workers if worker.batches]
                if len(trained) == len(self._slow_downs):
                    return
            time.sleep(TICK_S)
        raise RunFailed("not all workers had begun after two minutes")

    def _status(self) -> pb.GetJobStatusResponse:
        assert self._client is not None
        for process in self._processes:
            if process.poll() is not None:
                raise RunFailed(f"a process has ended: {self._said()}")
        return self._client.get_job_status()

    def _address(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with suppress(OSError):
                if address := (self._run_dir / "address").read_text().strip():
                    return address
            if self._processes[0].poll() is not None:
                break
            time.sleep(TICK_S)
        raise RunFailed(f"the coordinator did not come up: {self._said()}")

    @property
    def _run_dir(self) -> Path:
        return Path(self._folder.name) / "run"

    def _said(self) -> str:
        """The last line of each process."""
        found = []
        for path in sorted(Path(self._folder.name).glob("*.log")):
            lines = path.read_text(errors="replace").strip().splitlines()
            found += [f"{path.stem}: {lines[-1]}"] if lines else []
        return "; ".join(found)

    def _start(self, module: str, *arguments: str) -> None:
        log = Path(self._folder.name) / f"{len(self._processes)}-{module}.log"
        self._modules.append(module)
        with log.open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    cwd=ROOT,
                    env=child_environment({**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
