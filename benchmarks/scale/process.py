"""A coordinator as users start it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from benchmarks.cluster import ROOT, RunFailed
from benchmarks.processor import confine
from psrpc.ops.process import child_environment

START_S = 120.0
TICK_S = 0.02


class CoordinatorProcess:
    """``coordinator serve`` of the job ``benchmarks/jobs/scale.py`` in a directory that goes with
    it. Use it with ``with``; one thread uses it."""

    def __init__(self, shards: int, settings: Sequence[str] = (), core: int = 0) -> None:
        """``settings`` are ``key=value`` of the job; the process runs on one ``core``."""
        self._folder = tempfile.TemporaryDirectory(prefix="scale-", ignore_cleanup_errors=True)
        self._core = core
        self._port = 0
        sets = [word for setting in settings for word in ("--set", setting)]
        self._command = [
            *(sys.executable, "-m", "coordinator.cli", "serve"),
            *("--job", str(ROOT / "benchmarks" / "jobs" / "scale.py")),
            *("--run-dir", str(self.run_dir), "--shards", str(shards), "--resume", "auto"),
            *("--die-with-parent", "--metrics", "off", *sets),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def run_dir(self) -> Path:
        """The run directory; gone after the block."""
        return Path(self._folder.name) / "run"

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> CoordinatorProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        self._folder.cleanup()

    def start(self) -> str:
        """Starts it, again at the same port; returns the address once it serves the job. Raises
        RunFailed."""
        address = self.run_dir / "address"
        with suppress(OSError):
            address.unlink()
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [*self._command, "--bind", f"127.0.0.1:{self._port}"],
                cwd=ROOT,
                env=self._environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        confine(self.pid, self._core)
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.poll() is None:
            with suppress(OSError):
                if found := address.read_text().strip():
                    self._port = int(found.rpartition(":")[2])
                    return found
            time.sleep(TICK_S)
        raise RunFailed(f"the coordinator did not come up: {self.said()}")

    def kill(self) -> None:
        """Kills it; nothing happens if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def check(self) -> None:
        """Raises RunFailed if it has ended."""
        if self._process is None or self._process.poll() is not None:
            raise RunFailed(f"the coordinator has ended: {self.said()}")

    def said(self) -> str:
        """Returns its last lines."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:])

    def ledger_bytes(self) -> int:
        """Returns the size of the ledger with its log."""
        return sum(file.stat().st_size for file in self.run_dir.glob("ledger.sqlite*"))

    def _environment(self) -> dict[str, str]:
        """With compiled modules kept, as they are where a package is installed."""
        kept = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
        kept.pop("PYTHONDONTWRITEBYTECODE", None)
        return child_environment({**kept, "PYTHONPYCACHEPREFIX": f"{self._folder.name}/cache"})

    @property
    def _log(self) -> Path:
        return Path(self._folder.name) / "coordinator.log"
