"""A Spark of executors on this machine, and what tests do to them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import ROOT, command_line

EXECUTORS = 3
MASTER = f"local-cluster[{EXECUTORS},1,1024]"


@contextmanager
def spark(folder: Path) -> Iterator[Any]:
    """Runs Spark with ``EXECUTORS`` of one slot each; yields the session."""
    settings = {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "PYTHONPATH": str(ROOT),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        import pyspark
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master(MASTER)
        session = builder.config("spark.ui.enabled", "false").getOrCreate()
        # Where executors log, and nothing can change that.
        logs = Path(pyspark.__file__).parent / "work" / session.sparkContext.applicationId
        try:
            yield session
        finally:
            session.stop()
            shutil.rmtree(logs)


def submitting(folder: Path) -> dict[str, str]:
    """Returns the environment of ``spark-submit`` with ``EXECUTORS``; they log in ``folder``."""
    import pyspark

    home = folder / "spark"
    home.mkdir()
    # Executors log beside the programs, and nothing can change that.
    for each in Path(pyspark.__file__).parent.iterdir():
        if each.name != "work":
            (home / each.name).symlink_to(each)
    return {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_MASTER": MASTER,
    }


def executor_of(pid: int) -> int:
    """Returns the process of the executor that runs the task with the process ``pid``."""
    while "CoarseGrainedExecutorBackend" not in command_line(pid):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert pid > 1
    return pid
