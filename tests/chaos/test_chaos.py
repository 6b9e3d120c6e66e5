"""Schedules of faults against real processes; ``make chaos`` runs as many as one likes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster import ROOT

LIMIT_S = 280


@pytest.mark.slow
@pytest.mark.parametrize(("schedules", "kind"), [(10, ()), (3, ("--allreduce",))])
def test_nothing_is_lost_and_nothing_hangs(
    tmp_path: Path, schedules: int, kind: tuple[str, ...]
) -> None:
    """The first ten have every mode, both transports, tables, and all kinds of faults but the
    rarest."""
    command = [sys.executable, "-m", "tests.chaos", "--schedules", str(schedules), *kind]
    # In a process of its own: schedules fork, which one that has used gRPC must not.
    done = subprocess.run(
        [*command, "--jobs", "2", "--keep", str(tmp_path / "logs")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{schedules} of {schedules} schedules passed" in done.stdout
