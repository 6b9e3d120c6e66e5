"""The part of a status that describes the environment of a job, not the state of its course."""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path

from psrpc.checkpoint.manifest import MANIFEST
from psrpc.core.version import SOFTWARE
from psrpc.v1 import coordinator_pb2 as pb

UNKNOWN = -1
"""An age or a size that could not be determined."""

FREE_FOR_S = 5.0
"""How long a reading of the free disk space is reused."""


class Surroundings:
    """The coordinator's clock, version, disk and insecure flag. Not thread-safe."""

    def __init__(self, run_dir: Path, insecure: bool) -> None:
        """``insecure``: plaintext may leave this machine."""
        self._run_dir = run_dir
        self._insecure = insecure
        self._checkpoint = ("", 0.0)
        self._free = (-math.inf, UNKNOWN)

    def describe(self, status: pb.GetJobStatusResponse) -> pb.GetJobStatusResponse:
        """Fills in the environment's fields; returns ``status``."""
        status.insecure = self._insecure
        status.software = SOFTWARE
        status.clock_s = time.time()
        status.run_dir = str(self._run_dir)
        status.free_nbytes = self._free_nbytes()
        written = self._written_s(status.newest_checkpoint)
        status.checkpoint_age_s = max(0.0, status.clock_s - written) if written else UNKNOWN
        return status

    def _written_s(self, checkpoint: str) -> float:
        """Returns the time of a checkpoint in seconds since 1970, 0 if unknown. Reads the disk once
        per checkpoint."""
        if checkpoint != self._checkpoint[0]:
            written = 0.0
            if checkpoint:
                with contextlib.suppress(OSError):
                    written = (self._run_dir / checkpoint / MANIFEST).stat().st_mtime
            self._checkpoint = (checkpoint, written)
        return self._checkpoint[1]

    def _free_nbytes(self) -> int:
        now = time.monotonic()
        if now - self._free[0] >= FREE_FOR_S:
            try:
                stat = os.statvfs(self._run_dir)
            except OSError:
                self._free = (now, UNKNOWN)
            else:
                self._free = (now, stat.f_bavail * stat.f_frsize)
        return self._free[1]
