"""How a caller waits for its coordinator, over a real connection."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from coordinator.checkpoints.disk import ThreadedDisk
from coordinator.client import patience as patience_module
from coordinator.client.client import CoordinatorClient
from coordinator.client.patience import Patience
from coordinator.dashboard.snapshots import DashboardSnapshots
from coordinator.job.engine import Engine
from coordinator.job.job_run import JobRun
from coordinator.records.store import Store
from coordinator.rpc.server import SERVICE, Server
from psrpc.core.errors import CoordinatorUnreachable, Preparing
from psrpc.net.health import why_unhealthy
from psrpc.ops.clock import ManualClock
from psrpc.v1 import coordinator_pb2 as pb
from tests.coordinator.builders import make_run


def test_waiting_for_the_coordinator_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience_module, "ANNOUNCE_S", 0.0)
    monkeypatch.setattr(patience_module, "RETRY_S", 0.0)
    stopped = threading.Event()
    said: list[str] = []

    def announce(line: str) -> None:
        said.append(line)
        stopped.set()

    with (
        CoordinatorClient("127.0.0.1:1") as client,
        pytest.raises(CoordinatorUnreachable, match=r"127\.0\.0\.1:1"),
    ):
        Patience(client, 60, announce, stopped).persist(client.get_job)
    (line,) = said
    first = (
        "waiting for the coordinator at 127.0.0.1:1 (0 of 60 s): PS204: nothing listens at 127.0"
    )
    assert line.startswith(first)


def test_a_coordinator_that_reads_its_job_says_so_and_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little patience others have with silence."""
    monkeypatch.setattr(patience_module, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(patience_module, "RETRY_S", 0.01)
    run, tries = make_run(tmp_path), []

    async def main() -> pb.GetJobResponse:
        loop, tried = asyncio.get_running_loop(), asyncio.Event()
        async with Server("127.0.0.1:0") as server:
            address = f"127.0.0.1:{server.port}"
            assert await asyncio.to_thread(why_unhealthy, address, "", 10.0) == ""
            serves = await asyncio.to_thread(why_unhealthy, address, SERVICE, 10.0)
            assert serves.endswith("is NOT_SERVING")
            with CoordinatorClient(address) as client, Store(tmp_path / "ledger.sqlite") as store:

                def ask() -> pb.GetJobResponse:
                    tries.append(time.monotonic())
                    if tries[-1] - tries[0] > 4 * patience_s:
                        loop.call_soon_threadsafe(tried.set)
                    return client.get_job()

                with pytest.raises(Preparing, match=r"is reading its job \(0 s so far\)"):
                    await asyncio.to_thread(client.get_job)
                patience_s = 0.05
                asking = asyncio.ensure_future(
                    asyncio.to_thread(Patience(client, patience_s, print).persist, ask)
                )
                await asyncio.wait(
                    (asking, asyncio.ensure_future(tried.wait())), return_when="FIRST_COMPLETED"
                )
                disk = ThreadedDisk(run, failed=print)
                job_run = JobRun(run, store, ManualClock(), disk)
                await server.start(Engine(job_run, store), DashboardSnapshots("tiny", time.time))
                job = await asking
                assert await asyncio.to_thread(why_unhealthy, address, SERVICE, 10.0) == ""
                job_run.close()
        return job

    assert asyncio.run(main()).job_path == run.job_path
    assert len(tries) > 3
