"""Data frames of Spark as the training data of a job: Parquet files in the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psrpc.core.errors import LaunchFailed
from psrpc.core.text import counted
from psrpc.ops.extras import missing
from psrpc.ops.logs import get_logger

GROUP_NBYTES = 8 << 20
"""Size of a row group in bytes. ``Parquet`` shuffles the records of ``mix`` row groups together,
and holds up to twice as many row groups in memory."""

_DONE = "_SUCCESS"

log = get_logger()


def frames_of(data: object) -> dict[str, object]:
    """Returns frames and paths by the job's setting for each; a single one is for the setting
    ``data``."""
    if data is None:
        return {}
    return dict(data) if isinstance(data, Mapping) else {"data": data}


def place(run_dir: Path, setting: str, data: object) -> str:
    """Returns where the data of a setting lies, or will lie once it is written."""
    return str(data) if isinstance(data, str | Path) else str(run_dir / "spark-data" / setting)


def write_frame(frame: Any, path: Path) -> None:
    """Writes a frame as a directory of Parquet files, unless an earlier launch has done so.

    Raises:
        InvalidJob: pyarrow is missing.
        LaunchFailed: not all rows have arrived, because the executors write elsewhere.
    """
    if (path / _DONE).exists():
        log.info("the data is written already", path=str(path))
        return
    try:
        from pyarrow.parquet import read_metadata
    except ModuleNotFoundError:
        raise missing("launch.spark with data", "pyarrow", "spark") from None
    from pyspark.sql import Observation
    from pyspark.sql.functions import count, lit

    observation = Observation()
    observed = frame.observe(observation, count(lit(1)).alias("rows"))
    writer = observed.write.mode("overwrite").option("parquet.block.size", GROUP_NBYTES)
    writer.parquet(path.as_uri())
    rows = observation.get["rows"]
    found = sum(read_metadata(each).num_rows for each in path.glob("*.parquet"))
    if found != rows:
        (path / _DONE).unlink(missing_ok=True)
        raise LaunchFailed(
            f"{counted(rows, 'row')} of the frame are written, and {found} of them are in {path}: "
            "executors write to a disk of their own; the run directory has to lie on a file system "
            "that the driver and all executors share",
            code="PS141",
        )
    log.info("the data is written", path=str(path), rows=rows)
