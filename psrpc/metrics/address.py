"""Where a process is observed: metrics and spans. Imports nothing slow.

By default a process serves metrics on loopback at any free port, which its log names: so every
process is observable, only from its own machine, and processes on one machine do not collide. A
scraper on another machine needs a fixed port.
"""

from __future__ import annotations

OFF = "off"

HEALTH = "/healthz"
"""Path beside ``/metrics`` that returns the process's role without collecting figures."""

METRICS = "127.0.0.1:0"
"""Default of ``--metrics``."""

TRACE_HELP = (
    "send OpenTelemetry spans of push, pull, apply and checkpoint to this OTLP endpoint, such as "
    "http://localhost:4318/v1/traces (default: none)"
)
"""Help of ``--trace``."""
