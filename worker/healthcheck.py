"""The command ``worker healthcheck``. A worker serves nobody but who asks for its metrics, so that
is what is asked."""

from __future__ import annotations

import argparse

from psrpc.healthcheck import BAD_INPUT, add_timeout, said


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``worker healthcheck``."""
    parser.add_argument(
        "address", metavar="HOST:PORT", help="where its metrics are: its --metrics, a fixed port"
    )
    add_timeout(parser)


def check(args: argparse.Namespace) -> int:
    """Returns 0 when the worker answers; 1 when it does not; 2 for what cannot be asked."""
    import sys
    import urllib.request

    from psrpc.channel import format_address, parse_address
    from psrpc.errors import InvalidArgument, error_line

    try:
        where = format_address(*parse_address(args.address))
    except InvalidArgument as error:
        sys.stderr.write(error_line(error) + "\n")
        return BAD_INPUT
    # Never through a web proxy that the environment names.
    ask = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with ask.open(f"http://{where}/metrics", timeout=args.timeout) as answer:
            worker = b"\nworker_info{" in answer.read()
    except OSError as error:
        return said(f"{where}: {getattr(error, 'reason', error)}")
    return said("" if worker else f"{where} answers, and is no worker")
