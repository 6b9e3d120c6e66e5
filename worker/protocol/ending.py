"""How a worker's part in a job ends."""

from __future__ import annotations

from psrpc.core.errors import JobFailed
from psrpc.core.exit_status import DONE, INTERRUPTED
from psrpc.v1 import coordinator_pb2 as pb


class Stopped(Exception):
    """This worker was told to leave (a signal, or the job has ended), which its text says; not an
    error. ``status`` is the exit status."""

    def __init__(self, why: str, status: int = DONE) -> None:
        super().__init__(why)
        self.status = status


def raise_shutdown(shutdown: pb.Shutdown) -> None:
    """Ends this worker as the job has ended.

    Raises:
        JobFailed: with the job's reason.
        Stopped: the job is done, or was stopped.
    """
    if shutdown.failed:
        raise JobFailed(shutdown.reason)
    if shutdown.reason:
        raise Stopped(f"the job was {shutdown.reason}", INTERRUPTED)
    raise Stopped("the job is done")
