"""The errors of commands that find no coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from psrpc.core.errors import CoordinatorUnreachable, PsError
from psrpc.options.locate import not_running

if TYPE_CHECKING:
    from coordinator.client.client import CoordinatorClient


def check_way(client: CoordinatorClient, run_dir: Path | None = None) -> None:
    """Checks that a coordinator answers. Takes no time if so, otherwise less than the deadline of a
    call.

    Raises:
        PsError: see :func:`no_answer`.
    """
    cause = client.why_unreachable()
    if cause is not None:
        raise no_answer(client, cause, run_dir)


def no_answer(
    client: CoordinatorClient, cause: PsError | None = None, run_dir: Path | None = None
) -> PsError:
    """Returns the error of a call of ``client`` that found no coordinator, with the obstacle.

    Args:
        run_dir: the run directory that the address of ``client`` comes from, if any.
    """
    cause = cause or client.why_unreachable()
    if cause is not None and not cause.retryable:
        return cause
    if run_dir is not None:
        return not_running(run_dir, cause)
    which = "choose one with --coordinator HOST:PORT or --run-dir DIR"
    if cause is not None:
        return CoordinatorUnreachable(
            f"no coordinator answers: {cause}, or {which}", code=cause.code
        )
    return CoordinatorUnreachable(f"no coordinator answers at {client.address}; {which}")
