"""The command ``worker healthcheck``: reads the metrics page of a worker."""

from __future__ import annotations

import argparse

from psrpc.options.healthcheck import BAD_INPUT, add_timeout, said
from psrpc.options.security_options import add_security_arguments, from_arguments
from psrpc.security.identity import Role

MOST_BYTES = 1024
"""Bytes of an answer that the health check reads at most."""


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
