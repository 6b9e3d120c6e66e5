"""Reports of ``coordinator up`` to the coordinator, over real TLS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from coordinator.certificates.authority import make_certificates
from coordinator.client.client import CoordinatorClient
from coordinator.launch.fleet import Lookout
from psrpc.security.credentials import Security
from psrpc.security.identity import Role
from psrpc.v1.coordinator_pb2 import WorkerStatus
from tests.coordinator.builders import make_run, serving
from tests.coordinator.fakes import WorkerDouble


@contextmanager
def watching(address: str, security: Security) -> Iterator[Lookout]:
    lookout = Lookout(address, security, every_s=0.01)
    lookout.start()
    try:
        yield lookout
    finally:
        lookout.stop()


@pytest.mark.parametrize("by_token", [False, True])
def test_a_worker_that_died_has_left_at_once(by_token: bool, tmp_path: Path) -> None:
    """An operator may not say so with its own certificate. The clock stands, so no lease lapses."""
    certs, token = tmp_path / "certs", None
    make_certificates(certs, "tiny", datetime.now(UTC))
    if by_token:
        token = tmp_path / "token"
        token.touch(0o600)
        token.write_text("0123456789abcdef" * 2)
    coordinator, operator, worker = (
        Security.from_options(role, certs, token)
        for role in (Role.COORDINATOR, Role.OPERATOR, Role.WORKER)
    )
    with (
        serving(make_run(tmp_path), security=coordinator) as served,
        CoordinatorClient(served.address, worker) as client,
        watching(served.address, operator) as lookout,
    ):
        name = WorkerDouble(client, 7).register()
        lookout.worker_is_gone(WorkerStatus(worker=name, incarnation=7), "ended with SIGKILL")

        def states() -> list[str]:
            look = lookout.newest
            return [worker.state for worker in look.status.workers] if look else []

        served.wait_until(lambda: states() == ["left"])
