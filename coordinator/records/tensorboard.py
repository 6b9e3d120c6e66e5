"""Scalars, histograms and texts for TensorBoard, written without TensorFlow.

An event file is a sequence of ``Event`` protos in TFRecord framing. ``protos/`` has the few that
are written, so that the coordinator needs neither TensorFlow nor the ``tensorboard`` package.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from psrpc.v1.tensorboard_pb2 import TensorBoardEvent as Event
from psrpc.v1.tensorboard_pb2 import TensorBoardHparams as Hparams
from psrpc.v1.tensorboard_pb2 import TensorBoardSummary as Summary

FRAME_NBYTES = 16
"""Bytes of a record's length and two checksums. Load-bearing: TFRecord's."""


_HPARAMS = "_hparams_/session_start_info"
"""Load-bearing: TensorBoard's name for the settings of a run."""

_DT_STRING = 7
"""TensorFlow's number of the type. Load-bearing."""


class EventWriter:
    """Appends points to one new event file in ``logdir``; not thread-safe.

    The first point creates the directory and the file. Points reach the disk when the buffer is
    full, with ``flush`` or with ``close``; a process that dies loses the rest, and a reader skips a
    truncated record. A closed writer opens another file on its next use; TensorBoard reads all
    files of a directory as one run. Raises ``OSError`` if the disk refuses.
    """

    def __init__(self, logdir: Path, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._logdir = logdir
        self._wall_clock = wall_clock
        self._files = 0
        self._records: BinaryIO | None = None
        self.nbytes = 0
        """Size of all event files of ``logdir``, known after the first point."""

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Adds one point. A slash in ``tag`` groups charts; NaN and infinity are allowed."""
        self._add(Summary.Value(tag=tag, simple_value=value), step)

    def histogram(self, tag: str, counts: Sequence[int], step: int) -> None:
        """Adds a histogram of integers, unless it is empty: ``counts[n]`` is how often n
        occurred."""
        # Load-bearing: a TensorBoard bucket has the values above the previous limit, up to its own.
        seen = [n for n, count in enumerate(counts) if count]
        if not seen:
            return
        histogram = Summary.Histogram(
            min=seen[0],
            max=seen[-1],
            num=sum(counts),
            sum=sum(n * count for n, count in enumerate(counts)),
            sum_squares=sum(n * n * count for n, count in enumerate(counts)),
            bucket_limit=[n + 0.5 for n in range(seen[-1] + 1)],
            bucket=counts[: seen[-1] + 1],
        )
        self._add(Summary.Value(tag=tag, histo=histogram), step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Adds a text, shown as Markdown."""
        metadata = Summary.Metadata(plugin_data=Summary.PluginData(plugin_name="text"))
        tensor = Summary.Strings(dtype=_DT_STRING, string_val=[text.encode()])
        self._add(Summary.Value(tag=tag, tensor=tensor, metadata=metadata), step)

    def hparams(self, values: Mapping[str, str | float | bool | None]) -> None:
        """Adds the settings of a run, by which the HParams page compares it with others."""
        start = Hparams.SessionStart()
        for name, value in values.items():
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif value is None or isinstance(value, str):
                start.hparams[name].string_value = str(value).lower() if value is None else value
            else:
                start.hparams[name].number_value = value
        content = Hparams(session_start_info=start).SerializeToString()
        plugin = Summary.PluginData(plugin_name="hparams", content=content)
        metadata = Summary.Metadata(plugin_data=plugin)
        self._add(Summary.Value(tag=_HPARAMS, metadata=metadata), 0)

    def flush(self) -> None:
        """Hands everything written so far to the operating system."""
        if self._records is not None:
            self._records.flush()

    def close(self) -> None:
        """Writes the buffered points and closes the file; idempotent."""
        if self._records is not None:
            records, self._records = self._records, None
            records.close()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _open(self) -> BinaryIO:
        self._logdir.mkdir(parents=True, exist_ok=True)
        now = self._wall_clock()
        # TensorBoard recognizes event files by "tfevents" and reads them in the order of their
        # names, so the time comes first.
        self.nbytes = sum(file.stat().st_size for file in self._logdir.glob("events.out.*"))
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}"
        path = self._logdir / f"{name}.{os.getpid()}.{self._files}"
        self._files += 1
        records = path.open("xb")
        # The first record must state the version; without it a reader guesses.
        self._write(records, Event(wall_time=now, file_version="brain.Event:2"))
        return records

    def _write(self, records: BinaryIO, event: Event) -> None:
        encoded = event.SerializeToString()
        length = struct.pack("<Q", len(encoded))
        records.write(length + _checksum(length) + encoded + _checksum(encoded))
        self.nbytes += len(encoded) + FRAME_NBYTES

    def _add(self, value: Summary.Value, step: int) -> None:
        if self._records is None:
            self._records = self._open()
        event = Event(wall_time=self._wall_clock(), step=step, summary=Summary(value=[value]))
        self._write(self._records, event)


def _checksum(data: bytes) -> bytes:
    """Returns the CRC-32C of ``data``, masked as in TFRecord files
    (tensorflow/core/lib/hash/crc32c.h)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _table() -> tuple[int, ...]:
    entries = []
    for entry in range(256):
        for _ in range(8):
            entry = (entry >> 1) ^ (0x82F63B78 if entry & 1 else 0)
        entries.append(entry)
    return tuple(entries)


_TABLE = _table()
