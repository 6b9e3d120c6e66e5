"""The command ``worker healthcheck``. A worker serves nobody but who asks for its metrics, so that
is what is asked."""

from __future__ import annotations

import argparse

from psrpc.healthcheck import BAD_INPUT, add_timeout, said
from psrpc.identity import Role
from psrpc.security_options import add_security_arguments, from_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``worker healthcheck``."""
    parser.add_argument(
        "address",
        metavar="HOST:PORT",
        help="where its metrics are: its --metrics as it was told, with a fixed port",
    )
    add_timeout(parser)
    add_security_arguments(parser, listens=False)


def check(args: argparse.Namespace) -> int:
    """Returns 0 when the worker answers; 1 when it does not; 2 for what cannot be asked."""
    import http.client
    import sys
    import urllib.request

    from psrpc.channel import format_address, is_loopback, parse_address
    from psrpc.errors import InvalidArgument, error_line

    try:
        host, port = parse_address(args.address)
        where = format_address(host, port)
        # Never through a web proxy that the environment names.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        scheme = "http"
        # As the worker itself decides it, which was told the same address.
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
        with ask.open(f"{scheme}://{where}/metrics", timeout=args.timeout) as answer:
            worker = b"\nworker_info{" in answer.read()
    except (OSError, http.client.HTTPException) as error:
        return said(f"{where}: {getattr(error, 'reason', error)}")
    return said("" if worker else f"{where} answers, and is no worker")
