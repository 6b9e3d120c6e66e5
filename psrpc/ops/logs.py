"""Writes structured logs to standard error, for people or for machines."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Literal, TextIO

import structlog

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LogFormat = Literal["console", "json"]

_process = {"role": ""}


def configure(log_format: LogFormat, role: str) -> None:
    """Sets up structlog for this process; ``role`` ("shard 0", "worker-1") is on every line."""
    set_role(role)
    make_printing_safe()
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=log_format == "json"),
            _add_role,
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )


def make_printing_safe() -> None:
    """Makes standard output and error drop data that they cannot write, because a full disk or a
    closed pipe must not end a process."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # Leave replaced streams, such as those of tests, alone.
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _never_failing(stream))


class _Lossy(io.FileIO):
    """Drops data on write errors."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _never_failing(stream: TextIO) -> TextIO:
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Lossy(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


def set_role(role: str) -> None:
    """Changes the name of this process in its logs, for example when a worker has got its id."""
    _process["role"] = role


def _add_role(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    if _process["role"]:
        event["role"] = _process["role"]
    return event


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """Returns a module's logger; safe to call at import, before :func:`configure`."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger
