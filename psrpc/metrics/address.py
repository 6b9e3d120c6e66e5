"""The options that say who may look into a process: metrics, spans, reflection. Nothing that takes
long is imported.

Metrics are on loopback at any port unless told otherwise: every process can be looked at, nobody
from outside is let in, and processes on one machine do not get in each other's way. The log says
which port it became; who scrapes from elsewhere says a fixed one.
"""

from __future__ import annotations

import argparse

OFF = "off"

HEALTH = "/healthz"
"""Where a process says beside its metrics what it is, without collecting anything."""

METRICS = "127.0.0.1:0"
"""Where metrics are unless told otherwise."""


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
