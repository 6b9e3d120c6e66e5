"""The options of observation: metrics, spans, reflection. Imports nothing slow.

By default a process serves metrics on loopback at any free port, which its log names: so every
process is observable, only from its own machine, and processes on one machine do not collide. A
scraper on another machine needs a fixed port.
"""

from __future__ import annotations

import argparse

OFF = "off"

HEALTH = "/healthz"
"""Path beside ``/metrics`` that returns the process's role without collecting figures."""

METRICS = "127.0.0.1:0"
"""Default of ``--metrics``."""


def add_metrics_argument(parser: argparse.ArgumentParser) -> None:
    """Defines ``--metrics``."""
    parser.add_argument(
        "--metrics",
        default=METRICS,
        metavar="HOST:PORT|off",
        help="where Prometheus finds /metrics: on loopback in plain HTTP, elsewhere in HTTPS for "
        "holders of a certificate of the job, or with --insecure for everybody; port 0 is any, and "
        "the log says which (default: %(default)s)",
    )


def add_trace_argument(parser: argparse.ArgumentParser) -> None:
    """Defines ``--trace``."""
    parser.add_argument(
        "--trace",
        default="",
        metavar="URL",
        help="send OpenTelemetry spans of push, pull, apply and checkpoint to this OTLP endpoint, "
        "such as http://localhost:4318/v1/traces (default: none)",
    )


def add_reflection_argument(parser: argparse.ArgumentParser) -> None:
    """Defines ``--reflection``."""
    parser.add_argument(
        "--reflection",
        action="store_true",
        help="describe the services to callers that ask (gRPC reflection); on this machine's own "
        "addresses that is done in any case",
    )
