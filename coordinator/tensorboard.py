"""Scalars for TensorBoard, written without TensorFlow.

An event file is a sequence of ``Event`` protos in TFRecord framing; the ``tensorboard`` package
brings both, so the coordinator stays free of TensorFlow.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class ScalarWriter:
    """Appends scalars to one new event file in ``logdir``; not thread-safe.

    The directory and the file are made with the first scalar. Scalars reach the disk when the
    buffer is full, with ``flush`` or with ``close``; a process that dies loses the rest, and a
    reader skips a record cut in two. A writer that was closed opens another file when it is used
    again; TensorBoard reads all files of a directory as one run. Raises ``OSError`` if the disk
    refuses.
    """

    def __init__(self, logdir: Path, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._logdir = logdir
        self._wall_clock = wall_clock
        self._files = 0
        self._records: Any = None

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Adds one point. A slash in ``tag`` groups charts; NaN and infinity are allowed."""
        if self._records is None:
            self._records = self._open()
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        self._write(Event(wall_time=self._wall_clock(), step=step, summary=summary))

    def flush(self) -> None:
        """Hands everything written so far to the operating system."""
        if self._records is not None:
            self._records.flush()

    def close(self) -> None:
        """Writes what is left and closes the file. May be called twice."""
        if self._records is not None:
            records, self._records = self._records, None
            records.close()

    def __enter__(self) -> ScalarWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> Any:
        self._logdir.mkdir(parents=True, exist_ok=True)
        now = self._wall_clock()
        # TensorBoard knows event files by "tfevents" and reads them in the order of their names,
        # so the time comes first.
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}"
        path = self._logdir / f"{name}.{os.getpid()}.{self._files}"
        self._files += 1
        records = RecordWriter(path.open("xb"))
        # The first record must say the version; without it a reader falls back to guessing.
        records.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        return records

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
