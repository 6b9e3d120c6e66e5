"""Structured logs on standard error, for people or for machines."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal

import structlog

LogFormat = Literal["console", "json"]

_process = {"role": ""}


def configure(log_format: LogFormat, role: str) -> None:
    """Sets up structlog for this process; ``role`` ("shard 0", "worker-1") is on every line."""
    set_role(role)
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


def set_role(role: str) -> None:
    """Renames this process in its logs, e.g. once a worker has been given its id."""
    _process["role"] = role


def _add_role(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    if _process["role"]:
        event["role"] = _process["role"]
    return event


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """The logger of a module; safe to call at import, before :func:`configure`."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger
