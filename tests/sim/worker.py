"""A worker: the real protocol (``worker.conduct``), performed on a simulated network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pserver.assembly import Extent
from pserver.fence import Fence
from pserver.requests import InitializeRequest, PullRequest, PushRequest, PushResult, Values
from pserver.staging import Attempt
from pserver.table_ids import row_extents
from pserver.wire import from_decision
from psrpc.batch import BatchId
from psrpc.errors import NotReady, PsError
from psrpc.v1 import coordinator_pb2 as pb
from tests.sim.place import CALL_S, POLL_S, SHA
from tests.sim.received_rows import ReceivedRows
from tests.sim.router import Router
from tests.sim.schedule import Process, Schedule, Signal, Steps
from tests.sim.service import Tensors
from tests.sim.standing import Standing
from tests.sim.witness import ARENA, NDArray
from worker import actions as does
from worker.conduct import batch_id, conduct
from worker.ending import Stopped
from worker.leases import POLL_S as POLL_PAUSE_S
from worker.membership import Membership
from worker.standing import PAUSE_S

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster


class Worker:
    """One start of a worker's process."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self.process = process
        self._cluster = cluster
        self._schedule = cluster.schedule
        self._network = cluster.network
        self._witness = cluster.witness
        self._membership = Membership(process.incarnation)
        self._fences: list[Fence] = []
        self._parameters = self._witness.initial()
        self._versions = [0] * cluster.options.shards
        self._batch: BatchId | None = None
        self._round: int | None = None
        """Of what was pulled last; None is the newest."""
        self._rows = ReceivedRows(cluster, process)
        self._bases: tuple[int, ...] = ()
        """The versions that the gradient is computed from."""
        self._ahead: _Ahead | None = None
        self._standing = Standing(cluster, self._membership)
        self._router = Router(
            cluster.network,
            self._membership,
            cluster.options.patience_s,
            cluster.options.shared_memory,
            self._standing.due.send,
        )

    def live(self) -> Steps:
        """Takes part until the job ends; returns why it left."""
        self.process.spawn(self._standing.beat(self._router))
        actions = conduct()
        action = next(actions)
        answer: Any = None
        while True:
            error: PsError | Stopped | None = None
            try:
                answer = yield from self._perform(action)
            except (PsError, Stopped) as raised:
                error = raised
            try:
                action = actions.throw(error) if error else actions.send(answer)
            except (PsError, Stopped) as end:
                return end

    def terminate(self) -> None:
        """SIGTERM."""
        self._membership.stop()
        self._router.interrupt()

    def doing(self) -> str:
        """See :class:`tests.sim.cluster.Life`."""
        return f"{self._membership.worker} {self._standing.doing}"

    # -- the actions -------------------------------------------------------------------------

    def _perform(self, action: does.Action) -> Steps:
        """Carries an action out; returns what it is answered by, or raises."""
        self._standing.doing = (
            f"{type(action).__name__} in generation {self._membership.generation}"
        )
        member = self._membership
        answer: Any = None
        match action:
            case does.Register():
                request = member.register("here", self.process.incarnation, SHA, "cpu")
                member.registered(
                    (yield from self._standing.persist("RegisterWorker", request, CALL_S))
                )
            case does.Join():
                yield from self._join()
            case does.Rejoin():
                if self._ahead is not None:
                    while self._ahead.result is None:
                        yield self._ahead.signal.wait()
                self._ahead = None
                self._rows.drop()
                member.rejoins()
                yield self._schedule.sleep(PAUSE_S)
                member.check()
            case does.Lease():
                if action.after:
                    yield self._schedule.sleep(POLL_PAUSE_S)
                answer = yield from self._lease()
            case does.LeaseAhead():
                self._ahead = _Ahead(self._schedule)
                self.process.spawn(self._lease_ahead(self._ahead))
            case does.TakeLease():
                answer = yield from self._take_lease()
            case does.Pull():
                yield from self._pull(action)
            case does.Compute():
                yield from self._compute(action)
                finite = action.batch not in self._witness.skipped
                answer = does.Computed(1.0 if finite else float("nan"), finite)
            case does.PushPull() | does.Push():
                answer = yield from self._push(action)
            case does.Done():
                member.done(action.batch)
            case does.Commit():
                commit = member.commit(action.round, action.batch)
                response = yield from self._standing.persist(
                    "CommitBatch", commit, POLL_S, finishing=True
                )
                answer = response.lease
                self._cluster.invariants.check_lease(self, answer)
            case does.Initialize():
                yield from self._initialize()
                answer = pb.InitializeDone()
            case does.Evaluate():
                answer = yield from self._evaluate(action.task)
            case does.Merge():
                total, records = action.merge.states.variables[0].values
                answer = pb.MergeDone(
                    evaluation=action.merge.evaluation, results={"loss": total / records}
                )
            case does.ReportWork():
                yield from self._standing.persist("ReportWork", member.report(action.done), CALL_S)
            case does.Leave():
                yield from self._standing.leave(self._router, action)
            case does.Expect() | does.Settle() | does.TakeBack():
                pass
        return answer

    def _join(self) -> Steps:
        member = self._membership
        while True:
            try:
                cluster: pb.GetClusterResponse = yield from self._standing.persist(
                    "GetCluster", member.get_cluster(), POLL_S
                )
                break
            except NotReady:
                yield self._schedule.sleep(PAUSE_S)
                member.check()
        member.joined(cluster)
        self._cluster.invariants.check_worker(self, cluster.generation, None)
        self._router.addresses = [shard.address for shard in cluster.shards]
        self._fences = [
            Fence(cluster.generation, cluster.policy, self._witness.plan.hash, shard.incarnation)
            for shard in cluster.shards
        ]

    def _lease(self) -> Steps:
        member = self._membership
        asked = member.lease()
        response: pb.LeaseWorkResponse = yield from self._standing.persist(
            "LeaseWork", asked.request, POLL_S
        )
        member.leased(asked, response.lease)
        self._cluster.invariants.check_lease(self, response.lease)
        return response.lease

    def _lease_ahead(self, ahead: _Ahead) -> Steps:
        try:
            ahead.result = yield from self._lease()
        except (PsError, Stopped) as error:
            ahead.result = error
        ahead.signal.send()

    def _take_lease(self) -> Steps:
        ahead = self._ahead
        assert ahead is not None
        if ahead.result is None:
            # What is done by now must be reported: whether there is more may depend on it.
            self._standing.due.send()
        while ahead.result is None:
            yield ahead.signal.wait()
        self._membership.check()
        if isinstance(ahead.result, Exception):
            raise ahead.result
        return ahead.result

    def _pull(self, action: does.Pull) -> Steps:
        decision = None if action.decision is None else from_decision(action.decision)
        requests = [
            PullRequest(fence, self._membership.worker, action.round, decision, rows=rows)
            for fence, rows in zip(self._fences, self._rows.wanted(action.batch), strict=True)
        ]
        answers, _ = yield from self._call_all("Pull", requests)
        self._round = action.round
        self._rows.drop()
        self._receive(answers, action.batch)
        self._cluster.invariants.check_pull(self, self._parameters, action.round)

    def _receive(self, answers: Sequence[Values], batch: BatchId | None) -> None:
        """Takes over parameters, and rows of ``batch`` if there is one."""
        generation = self._membership.generation
        for shard, values in enumerate(answers):
            self._cluster.invariants.check_values(self, values, generation)
            np.copyto(self._witness.shard_part(self._parameters, shard), values.arrays[ARENA])
            self._versions[shard] = values.version
        self._cluster.invariants.check_worker(self, generation, tuple(self._versions))
        if batch is not None:
            self._rows.receive(batch, answers, self._parameters, self._versions)

    def _pull_rows(self, batch: BatchId) -> Steps:
        """Rows alone, of the same round or the newest."""
        worker = self._membership.worker
        requests = [
            PullRequest(fence, worker, self._round, rows=rows, rows_only=True)
            for fence, rows in zip(self._fences, self._rows.wanted(batch), strict=True)
        ]
        answers, _ = yield from self._call_all("Pull", requests)
        self._cluster.counts["rows pulled alone"] += 1
        for values in answers:
            self._cluster.invariants.check_values(self, values, self._membership.generation)
        self._rows.receive(batch, answers, self._parameters, self._versions)

    def _compute(self, action: does.Compute) -> Steps:
        options = self._cluster.options
        self._bases = tuple(self._versions)
        if options.tables:
            if not self._rows.has(action.batch):
                yield from self._pull_rows(action.batch)
            self._bases = tuple(map(min, self._versions, self._rows.take()))
        self._batch = action.batch
        if options.tables and options.prefetch and action.following is not None:
            yield from self._pull_rows(action.following)
            self._cluster.counts["rows prefetched"] += 1
        yield self._schedule.sleep(options.batch_s)

    def _following(self, action: does.PushPull) -> BatchId | None:
        """The batch whose rows come with a push, if they have not come before."""
        if not self._cluster.options.tables or not self._rows.none:
            return None
        ahead = None if self._ahead is None else self._ahead.result
        if action.following is None and isinstance(ahead, pb.Lease) and ahead.train.batches:
            return batch_id(ahead.train.batches[0].batch)
        return action.following

    # -- gradients -----------------------------------------------------------------------------

    def _push(self, action: does.Push | does.PushPull) -> Steps:
        assert action.batch == self._batch
        requests = []
        following = self._following(action) if isinstance(action, does.PushPull) else None
        wanted = self._rows.wanted(following)
        for shard, fence in enumerate(self._fences):
            part = self._witness.shard_part(self._parameters, shard)
            self._cluster.invariants.policies.check_fresh(self.process, action.attempt, part)
            gradient = self._witness.gradient(action.batch, self._parameters, shard)
            assert (gradient is None) == action.skip
            header = PushRequest(
                fence=fence,
                worker=self._membership.worker,
                attempt=Attempt(action.batch, action.attempt),
                base_version=self._bases[shard],
                examples=action.batch.count,
                skipped=action.skip,
                extents=() if gradient is None else (Extent(0, gradient.nbytes, "plain"),),
            )
            rows: tuple[NDArray, ...] = ()
            if gradient is not None and self._cluster.options.tables:
                ids = self._witness.tables.wanted(action.batch, shard)
                extents = (*header.extents, *row_extents(self._witness.plan, ids))
                header = replace(header, extents=extents, rows=ids)
                rows = self._witness.row_gradients(action.batch, gradient, shard)
            requests.append((header, Tensors(gradient, rows, wanted[shard])))
        method = type(action).__name__
        answers, asked_again = yield from self._call_all(method, requests)
        results: list[PushResult] = answers
        if isinstance(action, does.PushPull):
            results = [result for result, _ in answers]
            self._round = None
            if following is not None:
                self._cluster.counts["rows pulled with a push"] += 1
            self._receive([values for _, values in answers], following)
            self._cluster.invariants.check_pull(self, self._parameters, None)
        return does.Pushed(
            max(result.staleness for result in results),
            tuple(k for k, r in enumerate(results) if r.outcome == "already_applied"),
            asked_again,
            tuple(k for k, r in enumerate(results) if r.outcome == "too_stale"),
        )

    def _initialize(self) -> Steps:
        values = self._witness.initial()
        requests = []
        for shard, fence in enumerate(self._fences):
            part = self._witness.shard_part(values, shard)
            header = InitializeRequest(fence, (Extent(0, part.nbytes, "plain"),))
            requests.append((header, Tensors(part)))
        yield from self._call_all("Initialize", requests)

    def _evaluate(self, task: pb.EvaluateTask) -> Steps:
        worker, every = self._membership.worker, self._rows.every()
        requests = [
            PullRequest(fence, worker, task.snapshot, rows=rows)
            for fence, rows in zip(self._fences, every, strict=True)
        ]
        answers, _ = yield from self._call_all("Pull", requests)
        parameters = self._witness.initial()
        for shard, values in enumerate(answers):
            np.copyto(self._witness.shard_part(parameters, shard), values.arrays[ARENA])
            self._rows.check(shard, every[shard], values, parameters)
        self._cluster.invariants.check_pull(self, parameters, task.snapshot)
        yield self._schedule.sleep(self._cluster.options.batch_s)
        records = task.stop - task.start
        state = pb.MetricVariable(
            shape=[2], values=[self._witness.loss(parameters) * records, records]
        )
        return pb.EvaluateDone(
            evaluation=task.evaluation,
            task=task.task,
            records=records,
            states=pb.MetricStates(variables=[state]),
        )

    def _call_all(self, method: str, requests: Sequence[Any]) -> Steps:
        self._standing.check(finishing=method.startswith("Push"))
        answers = yield from self._router.call(method, requests)
        return answers


class _Ahead:
    """A request for work that goes on beside the batches."""

    def __init__(self, schedule: Schedule) -> None:
        self.result: pb.Lease | Exception | None = None
        self.signal = Signal(schedule)
