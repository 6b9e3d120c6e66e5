"""SIGTERM to a real worker while it waits for what does not come: it leaves, and says so."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal

import pytest

from psrpc import SOFTWARE
from psrpc.core.placement import make_plan
from psrpc.v1 import coordinator_pb2 as pb
from tests.e2e.cluster import JOBS, Gate, Process
from tests.worker.scripted_coordinator import ScriptedCoordinator, serve_script
from tests.worker.shards import Shards, serve_shards

pytestmark = pytest.mark.slow

GATED = JOBS / "gated.py"
BATCHES = [
    {"batch": {"first": 20 * index, "count": 20}, "attempt": index + 1} for index in range(2)
]
TASK = pb.Lease(train=pb.TrainTask(batches=BATCHES))

GONE_S = 30
"""A hang guard; what the worker waits for would have lasted a minute, or for ever."""

Missing = Literal["a shard", "the coordinator", "data"]


class Standstill(ScriptedCoordinator):
    """Answers nothing any more, heartbeats neither, once it was stopped."""

    def __init__(self, cluster: pb.GetClusterResponse) -> None:
        super().__init__(cluster)
        self.stopped, self.go_on = threading.Event(), threading.Event()

    def stop(self) -> pb.Lease:
        self.stopped.set()
        self.go_on.wait()
        return TASK

    def HeartbeatWorker(  # noqa: N802
        self, request: pb.HeartbeatWorkerRequest, context: Any
    ) -> Any:
        if self.stopped.is_set():
            self.go_on.wait()
        return super().HeartbeatWorker(request, context)


@pytest.mark.parametrize("missing", ["a shard", "the coordinator", "data"])
def test_a_worker_that_waits_leaves_when_it_is_told_to(missing: Missing, tmp_path: Path) -> None:
    from worker.job.loader import load_job
    from worker.model.variables import model_variables
    from worker.step.replica import Replica

    loaded = load_job(GATED)
    variables = [spec for spec, _ in model_variables(Replica(loaded.job).model)]
    with ExitStack() as stack:
        shards = stack.enter_context(serve_shards(make_plan(variables, 2, "cut")))
        coordinator = Standstill(shards.cluster)
        stack.enter_context(serve_script(coordinator))
        stack.callback(coordinator.go_on.set)
        coordinator.job = pb.GetJobResponse(
            job_path=str(GATED),
            job_sha256=loaded.sha256,
            mode="async",
            software=SOFTWARE,
            data_fingerprint=loaded.job.train.fingerprint(),
        )
        coordinator.leases.extend([pb.Lease(initialize=pb.InitializeWork()), TASK])
        gate = stack.enter_context(closing(Gate(tmp_path, epoch=0 if missing == "data" else 9)))
        if missing != "data":
            coordinator.leases[-1] = lose(missing, coordinator, shards)
        args = ("run", "--coordinator", coordinator.address, "--gpu", "none")
        worker = Process("worker", "worker", *args, **gate.environment)
        stack.callback(worker.end)
        if missing == "the coordinator":
            assert coordinator.stopped.wait(240), worker.text()
        else:
            what = (
                "the shards: shard 1 .*unreachable" if missing == "a shard" else "the training data"
            )
            worker.wait_for(f"waiting for {what}")
        worker.kill(signal.SIGTERM)
        assert worker.popen.wait(GONE_S) == 75, worker.text()
        if missing != "the coordinator":
            (left,) = coordinator.of(pb.LeaveWorkerRequest)
            assert (left.reason, left.fatal) == ("told to stop", False)


def lose(missing: Missing, coordinator: Standstill, shards: Shards) -> Callable[[], pb.Lease]:
    """Loses it when the worker asks for work."""
    if missing == "the coordinator":
        return coordinator.stop

    def lose_a_shard() -> pb.Lease:
        shards.servers[1].stop(0)
        return TASK

    return lose_a_shard
