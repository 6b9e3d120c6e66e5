"""A worker from its first word to the coordinator to its last."""

from __future__ import annotations

import gc
from contextlib import ExitStack, closing

from pserver.workspace import Workspace
from psrpc.encoding import wire_encoding
from psrpc.errors import InvalidJob, NotReady, PsError, StaleGeneration
from psrpc.logs import get_logger
from psrpc.plan import Plan
from psrpc.v1 import coordinator_pb2 as pb
from worker.async_loop import AsyncLoop
from worker.compute import BatchReader, Compute
from worker.devices import Device
from worker.evaluator import Evaluator
from worker.initializer import initial_values
from worker.loader import LoadedJob
from worker.replica import Replica
from worker.router import Router
from worker.standing import Standing, raise_shutdown
from worker.step_times import StepTimes
from worker.sync_loop import SyncLoop

log = get_logger()


class Trainer:
    """Does what the coordinator leases to this worker, until the job ends. One thread uses it.

    What depends on the plan is made once; what depends on where the shards are is made anew each
    time the worker joins.
    """

    def __init__(
        self,
        loaded: LoadedJob,
        device: Device,
        standing: Standing,
        times: StepTimes | None = None,
        *,
        shm: bool = True,
    ) -> None:
        """``shm``: share memory with shards on this host."""
        self._loaded = loaded
        self._device = device
        self._standing = standing
        self._times = times or StepTimes()
        self._shm = shm
        self._replica: Replica | None = None
        self._plan: Plan | None = None
        self._compute: Compute | None = None
        self._evaluator: Evaluator | None = None

    def run(self) -> None:
        """Works until the job ends.

        Raises:
            Stopped: the job is done, or the process was told to leave.
            JobFailed: the job has failed.
            InvalidJob: the user's code or data failed, which fails the job for everybody.
            PsError: whatever else ends this worker.
        """
        with ExitStack() as stack:
            try:
                while True:
                    self._standing.register(self._loaded.sha256, self._device.label)
                    if self._replica is None:
                        # Before the shards are asked for: they may still be starting.
                        self._replica = Replica(self._loaded.job)
                    try:
                        self._work(self._standing.get_cluster(), stack)
                    except StaleGeneration as error:
                        log.info("joining again", reason=str(error))
                        self._standing.begin_again()
                    self._leave()
            except InvalidJob as error:
                self._standing.leave(str(error), fatal=True)
                raise
            except PsError as error:
                self._standing.leave(str(error))
                raise

    def _work(self, cluster: pb.GetClusterResponse, stack: ExitStack) -> None:
        """Works with the shards of ``cluster`` until something raises."""
        plan = Plan.from_json(cluster.plan)
        replica = self._prepare(plan, stack)
        assert self._compute is not None  # _prepare has made it
        # Anew each time: a shard that was given up may still use the last one.
        wire = wire_encoding(self._loaded.job.wire_dtype)
        workspace = Workspace(plan, wire, self._shm)
        if workspace.why:
            log.info("tensors go over the network", why=f"shared memory: {workspace.why}")
        self._compute.renew(workspace)
        with (
            closing(workspace),
            Router(cluster, plan, self._standing, workspace) as router,
            AsyncLoop(self._compute, router, self._standing, self._times) as async_loop,
        ):
            sync_loop = SyncLoop(self._compute, router, self._standing, self._times)
            lease = self._standing.lease()
            while True:
                self._standing.check()
                match lease.WhichOneof("work"):
                    case "train":
                        lease = async_loop.run(lease.train)
                        continue
                    case "round":
                        lease = sync_loop.run(lease.round)
                        continue
                    case "initialize":
                        log.info("initializing the shards", shards=plan.shards)
                        router.initialize(initial_values(replica, plan))
                        self._standing.report(initialized=pb.InitializeDone())
                    case "evaluate":
                        evaluator = self._make_evaluator(replica, plan)
                        self._standing.report(evaluated=evaluator.evaluate(lease.evaluate, router))
                    case "merge":
                        evaluator = self._make_evaluator(replica, plan)
                        self._standing.report(merged=evaluator.merge(lease.merge))
                    case "wait":
                        lease = self._wait(lease.wait)
                        continue
                    case "finished":
                        raise_shutdown(lease.finished)
                    case _:
                        raise NotReady("the coordinator leased nothing; is it of this version?")
                lease = self._standing.lease()

    def _leave(self) -> None:
        """Gives the memory of the last workspace back, before there is another."""
        if self._compute is not None:
            self._compute.leave()
        # An error and the frames that it passed through, which know the workspace, refer to each
        # other.
        gc.collect()

    def _prepare(self, plan: Plan, stack: ExitStack) -> Replica:
        """Makes what depends on the plan, which stays the same for the life of a job."""
        assert self._replica is not None  # run has made it
        if self._plan != plan:
            read = BatchReader(self._loaded.job, self._device, self._replica.num_seeds())
            compute = Compute(self._replica, plan, self._device, read, self._standing.waits)
            self._compute = stack.enter_context(compute)
            self._evaluator = None
            self._plan = plan
        return self._replica

    def _make_evaluator(self, replica: Replica, plan: Plan) -> Evaluator:
        if self._evaluator is None:
            self._evaluator = Evaluator(replica, plan, self._device)
        return self._evaluator

    def _wait(self, wait: pb.Wait) -> pb.Lease:
        """Asks again until there is work."""
        reason = wait.reason
        with self._standing.waits.on(reason):
            while True:
                # The coordinator holds the request for a while; this is for one that does not.
                self._standing.pause(0.02)
                lease = self._standing.lease()
                if lease.WhichOneof("work") != "wait":
                    return lease
                self._standing.waits.on(lease.wait.reason)
