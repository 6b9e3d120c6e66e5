"""A worker's Prometheus metrics, ``worker_*``, and its health check."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from psrpc.core.version import SOFTWARE
from psrpc.metrics.exporter import Family
from psrpc.options.healthcheck import BAD_INPUT, add_timeout, said
from psrpc.options.security_options import add_security_arguments, from_arguments
from psrpc.security.identity import Role
from psrpc.v1 import coordinator_pb2 as pb

MOST_BYTES = 1024
"""Bytes of an answer that the health check reads at most."""

CAUSES = ("data", "compute", "barrier", "network", "apply")
"""The causes that a worker's time counts towards, see ``WorkerTimes``."""


def families(
    worker: str, generation: int, waiting_for: str, steps: int, times: pb.WorkerTimes
) -> Iterator[Family]:
    """Yields all metrics of a worker.

    Args:
        worker: its name; empty before it has one.
        waiting_for: a description; empty while it works.
        steps: the number of finished steps of this process.
        times: where its time went.
    """
    info = GaugeMetricFamily(
        "worker_info", "Always 1; the name is the coordinator's.", labels=("worker", "version")
    )
    info.add_metric((worker, SOFTWARE), 1)
    yield info
    yield CounterMetricFamily("worker_steps", "Finished steps.", value=steps)
    seconds = CounterMetricFamily(
        "worker_seconds", "Time in and between steps, by cause.", labels=("cause",)
    )
    for cause in CAUSES:
        seconds.add_metric((cause,), getattr(times, cause))
    yield seconds
    yield GaugeMetricFamily("worker_generation", "The generation of the job.", value=generation)
    yield GaugeMetricFamily(
        "worker_waiting", "Whether it waits for a peer.", value=bool(waiting_for)
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``worker healthcheck``."""
    parser.add_argument(
        "address",
        metavar="HOST:PORT",
        help="where its metrics are: its --metrics as it was told, with a fixed port",
    )
    add_timeout(parser)
    add_security_arguments(parser, listens=False)


def check_worker(args: argparse.Namespace) -> int:
    """Returns 0 if the worker answers, 1 if it does not, 2 if the arguments are invalid."""
    import http.client
    import sys
    import urllib.request

    from psrpc.core.errors import InvalidArgument, error_line
    from psrpc.metrics.address import HEALTH
    from psrpc.net.channel import format_address, is_loopback, parse_address

    try:
        host, port = parse_address(args.address)
        where = format_address(host, port)
        # Bypass web proxies that the environment names.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        scheme = "http"
        # The worker decides by the same address whether to encrypt.
        if not is_loopback(host):
            security = from_arguments(Role.WORKER, args)
            if security.encrypted and not security.by_token:
                scheme = "https"
                handlers.append(urllib.request.HTTPSHandler(context=security.https_reader()))
    except InvalidArgument as error:
        sys.stderr.write(error_line(error) + "\n")
        return BAD_INPUT
    ask = urllib.request.build_opener(*handlers)
    try:
        with ask.open(f"{scheme}://{where}{HEALTH}", timeout=args.timeout) as answer:
            worker = answer.read(MOST_BYTES).strip() == Role.WORKER.encode()
    except (OSError, http.client.HTTPException) as error:
        return said(f"{where}: {getattr(error, 'reason', error)}")
    return said("" if worker else f"{where} answers, and is no worker")
