"""Runs jobs and predictions of one caller one after the other, with one fork server for all.

``python -m coordinator.launch.host REQUESTS REPLIES`` reads requests of
:mod:`psrpc.ops.host_requests` from one inherited descriptor and writes an exit status for each to
the other. It ends when REQUESTS closes. ``pserver.Cluster`` starts it
(docs/design/0028-fit-on-a-cluster.md).
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from psrpc.ops.host_requests import PartsRequest, decode_request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from coordinator.launch.warm_start import WarmStart


def main() -> int:
    """Serves the requests of the descriptors on the command line; returns 0."""
    requests, replies = map(int, sys.argv[1:])
    from coordinator.launch.commands import cluster_environment
    from coordinator.launch.warm_start import WarmStart
    from psrpc.ops.logs import make_printing_safe
    from psrpc.ops.process import quiet_grpc

    quiet_grpc()
    with (
        WarmStart(cluster_environment(os.environ)) as warm_start,
        os.fdopen(requests, encoding="utf-8") as lines,
        os.fdopen(replies, "w", encoding="utf-8") as answers,
    ):
        make_printing_safe()
        serve(lines, answers, warm_start)
    return 0


def serve(lines: TextIO, answers: TextIO, warm_start: WarmStart) -> None:
    """Runs the requests, one per line, until ``lines`` ends; answers each with its exit status."""
    # Imported here, before the first request arrives, because it takes half a second.
    from coordinator.launch import up
    from coordinator.launch.commands import cluster_environment
    from coordinator.launch.options import add_up_arguments
    from coordinator.launch.parts import Parts
    from psrpc.options.command_line import Parser

    parser = Parser(prog="coordinator up")
    add_up_arguments(parser)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in lines:
        request = decode_request(line)
        with _output_to(request.output):
            try:
                if isinstance(request, PartsRequest):
                    status = Parts(request, cluster_environment(os.environ), warm_start).run()
                else:
                    status = up.run(parser.parse_args(request.arguments), warm_start)
            except SystemExit as refused:
                status = int(refused.code or 0)
        # A late SIGINT is meant for the run that has ended.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            answers.write(f"{status}\n")
            answers.flush()
        except BrokenPipeError:
            # The caller is gone, and so is the need for a cluster.
            os._exit(1)


@contextmanager
def _output_to(path: str) -> Iterator[None]:
    """Appends the output of this process to the file ``path`` within the block."""
    streams = (sys.stdout, sys.stderr)
    before = [os.dup(stream.fileno()) for stream in streams]
    with Path(path).open("ab") as file:
        for stream in streams:
            os.dup2(file.fileno(), stream.fileno())
    try:
        yield
    finally:
        for stream, handle in zip(streams, before, strict=True):
            stream.flush()
            os.dup2(handle, stream.fileno())
            os.close(handle)


if __name__ == "__main__":
    sys.exit(main())
