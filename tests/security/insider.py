"""A cluster with certificates that trains, and a member of it that means harm.

Coordinator, shards and honest workers are the real ones, each in a thread, and speak TLS with
certificates as ``coordinator certs init`` makes them. The job is the witness model of the chaos
tests, whose parameters say how often each batch counted.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import structlog.testing

from coordinator.client.client import CoordinatorClient
from coordinator.core.description_reader import parse_description
from coordinator.core.run import Run
from coordinator.rpc.status import write_status
from pserver.client.client import PushResult, RetryPolicy, ShardClient
from pserver.client.requests import GradientPush, Source
from pserver.process.config import ServeConfig
from pserver.process.ending import Ending
from pserver.process.shard import serve
from psrpc import SOFTWARE
from psrpc.core.batch import BatchId
from psrpc.core.encoding import Encoded, Gradient, plain
from psrpc.core.errors import PsError
from psrpc.core.policy import Policy
from psrpc.security.credentials import Security
from psrpc.security.identity import Role
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import from_batch
from tests.chaos.invariants import check_cuts, check_final_state
from tests.chaos.witness import Array, Options, Torn, description, gradient
from tests.chaos.worker_process import WitnessSource
from tests.coordinator.builders import Served, serving
from tests.worker.fakes import FakeResult
from worker.embedding.row_sets import ReceivedRows
from worker.loop.performer import Performer
from worker.loop.session import WorkerSession
from worker.protocol.done import Stopped
from worker.step.gradient_source import PullSnapshot

ASYNC = Policy(mode="async")
SYNC = Policy(mode="sync", replicas=2)

WAIT_S = 30.0
"""How long a test waits for what must come at once."""

LOOK_S = 0.02
"""Between two looks of an honest worker that is held up."""

ONE_TRY = RetryPolicy(budget_s=0.0)


def options_of(policy: Policy = ASYNC) -> Options:
    """A job of 32 batches on two shards."""
    return Options(
        policy=policy,
        shards=2,
        workers=1,
        optimizer="sgd",
        epochs=1,
        batches=32,
        pairs=16,
        shm=False,
        checkpoint_every=1000,
        pace_ms=0,
        data=True,
    )


@dataclass
class Gate:
    """Holds honest workers at the batch ``at`` and all after it, until it is ``opened``; with
    ``evaluations``, at what they evaluate, too."""

    at: int
    evaluations: bool = False
    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    evaluating: threading.Event = field(default_factory=threading.Event)
    evaluate: threading.Event = field(default_factory=threading.Event)


class HonestSource(WitnessSource):
    """The witness model's gradients, behind a gate, and evaluations whose loss is always 1."""

    def __init__(self, options: Options, gate: Gate, standing: WorkerSession) -> None:
        # The directory exists, so the gate of the chaos tests is open.
        super().__init__(options, Path("/"), standing)
        self._held_by = gate
        self._checks = standing.check
        self._numbered = options.number

    def gradient(self, batch: BatchId, given: int, received: ReceivedRows | None, /) -> FakeResult:
        gate = self._held_by
        if self._numbered(batch) >= gate.at:
            gate.reached.set()
            self._await(gate.opened)
        return super().gradient(batch, given, received)

    def evaluate(
        self, task: pb.EvaluateTask, generation: int, pull: PullSnapshot
    ) -> pb.EvaluateDone:
        if self._held_by.evaluations:
            self._held_by.evaluating.set()
            self._await(self._held_by.evaluate)
        records = task.stop - task.start
        return pb.EvaluateDone(
            evaluation=task.evaluation,
            task=task.task,
            records=records,
            states=mean_states(float(records), records),
        )

    def merge(self, merge: pb.MergeEvaluation) -> pb.MergeDone:
        total, count = merge.states.variables[0].values
        return pb.MergeDone(evaluation=merge.evaluation, results={"loss": total / count})

    def _await(self, event: threading.Event) -> None:
        while not event.wait(LOOK_S):
            self._checks()

    def _say_and_die(self, torn: Torn) -> NoReturn:
        raise torn


def mean_states(total: float, count: int) -> pb.MetricStates:
    """A mean loss, as its metric keeps it."""
    return pb.MetricStates(variables=[pb.MetricVariable(shape=[2], values=[total, count])])


class Cluster:
    """A job that trains. :meth:`finish` lets it end, and checks that each batch counted once."""

    def __init__(self, served: Served, run: Run, options: Options, certs: Path) -> None:
        self.served = served
        self.run = run
        self.options = options
        self.certs = certs
        self.gate = Gate(at=options.total_batches)
        self.logs: list[Any] = []
        self._threads: list[threading.Thread] = []
        self._endings: dict[int, Ending] = {}
        self._shards: dict[int, threading.Thread] = {}
        self.errors: list[BaseException] = []

    def security(self, role: Role) -> Security:
        """That of a process with this role's certificate."""
        return Security.from_options(role, self.certs)

    def start_shards(self) -> None:
        """All shards, and waits for the generation that they form."""
        for shard in range(self.options.shards):
            self._start_shard(shard)
        self.served.wait_until(lambda: self.served.job_run.complete)

    def _start_shard(self, shard: int) -> None:
        config = ServeConfig(
            shard=shard,
            coordinator=self.served.address,
            bind="127.0.0.1:0",
            connect_timeout_s=WAIT_S,
            security=self.security(Role.SHARD),
        )
        ending = self._endings[shard] = Ending()
        self._shards[shard] = self._thread(lambda: serve(config, ending))

    def start_worker(self) -> None:
        """An honest worker, held by the cluster's gate."""

        def work() -> None:
            with (
                CoordinatorClient(self.served.address, self.security(Role.WORKER)) as client,
                WorkerSession(client, secrets.randbits(63), connect_timeout_s=WAIT_S) as standing,
            ):
                source = HonestSource(self.options, self.gate, standing)
                standing.get_job()
                sha256 = self.run.description.job_sha256
                with Performer(source, standing, sha256, "cpu", shm=False) as performer:
                    try:
                        performer.run()
                    except Stopped:
                        return

        self._thread(work)

    def replace_shard(self, shard: int) -> None:
        """One shard ends, and another process takes its place: the next generation."""
        self._endings[shard].end()
        self._shards[shard].join(WAIT_S)
        generation = self.run_now.generation
        self._start_shard(shard)
        self.served.wait_until(
            lambda: self.run_now.generation > generation and self.served.job_run.complete
        )

    def take_place(self, index: int, insider: Insider) -> bytes:
        """A shard ends, and ``insider`` takes its place, and says that it holds what it should.
        The key of grants, which it learns by that."""
        self._endings[index].end()
        self._shards[index].join(WAIT_S)
        incarnation = insider.incarnation
        insider.client.register_shard(
            pb.RegisterShardRequest(
                shard=index, incarnation=incarnation, address="127.0.0.1:1", software=SOFTWARE
            )
        )
        commands = insider.client.watch(pb.WatchRequest(shard=index, incarnation=incarnation))
        begin = next(iter(commands)).begin
        insider.client.report_shard_ready(
            pb.ReportShardReadyRequest(
                shard=index, incarnation=incarnation, generation=begin.generation, initialized=True
            )
        )
        self.served.wait_until(lambda: self.served.job_run.complete)
        return begin.grant_key

    @property
    def run_now(self) -> Run:
        """As of the present generation."""
        return self.served.job_run.run

    def train_to(self, at: int) -> None:
        """An honest worker trains, and is held before batch ``at``."""
        self.gate.at = at
        self.start_worker()
        assert self.gate.reached.wait(WAIT_S), self.errors

    def status(self) -> pb.GetJobStatusResponse:
        """As an operator sees it."""
        found = self.served.do(write_status, self.served.job_run)
        assert isinstance(found, pb.GetJobStatusResponse)
        return found

    def told(self, words: str) -> bool:
        """Whether a log line above debug, or a warning of the status, has these words."""
        lines = [repr(entry) for entry in self.logs if entry["log_level"] != "debug"]
        return any(words in line for line in (*lines, *self.status().warnings))

    def finish(self, poisoned: int | None = None) -> pb.GetJobStatusResponse:
        """Lets the honest worker go on to the end of the job.

        Args:
            poisoned: the batch that an insider to whom it was leased has skipped.
        """
        status = self.wait_for_the_end()
        options = replace(self.options, poisoned=poisoned)
        assert status.phase == "done", status.reason
        assert status.batches == options.total_batches
        assert status.skipped == (poisoned is not None)
        assert check_final_state(self.run.run_dir, options) == []
        assert check_cuts(self.run.run_dir, options) == []
        return status

    def wait_for_the_end(self) -> pb.GetJobStatusResponse:
        """The status of the job once all its processes have ended without an error."""
        self.gate.opened.set()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), (self.status().phase, self.status().waiting_for)
        assert not self.errors, self.errors
        return self.status()

    def stop(self) -> None:
        """Ends what is left of a job that a test gave up."""
        self.gate.opened.set()
        self.served.do(self.served.job_run.fail, "the test is over")
        for ending in self._endings.values():
            ending.end()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _thread(self, target: Any) -> threading.Thread:
        def run() -> None:
            try:
                target()
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread


@contextmanager
def cluster(
    certs: Path, run_dir: Path, policy: Policy = ASYNC, **changes: Any
) -> Iterator[Cluster]:
    """A coordinator and its shards; ``changes`` are those of the job's description."""
    options = options_of(policy)
    run = run_of(run_dir, options, **changes)
    with (
        structlog.testing.capture_logs() as logs,
        serving(run, security=Security.from_options(Role.COORDINATOR, certs)) as served,
    ):
        made = Cluster(served, run, options, certs)
        made.logs = logs
        try:
            made.start_shards()
            yield made
        finally:
            made.stop()


def run_of(run_dir: Path, options: Options, **changes: Any) -> Run:
    """The run of a witness job, and its directory."""
    (run_dir / "token").write_text("the token of the run")
    return Run(
        run_id="r1",
        run_dir=run_dir,
        job_path="jobs/witness.py",
        overrides=(),
        token="the token of the run",
        description=parse_description(json.dumps(description(options) | changes)),
        plan=options.plan,
    )


class Insider:
    """A member that has the files of one role, and does what it likes with them."""

    def __init__(
        self, cluster: Cluster, role: Role = Role.WORKER, certs: Path | None = None
    ) -> None:
        """``certs``: a directory with other files of the role."""
        self.cluster = cluster
        self.plan = cluster.options.plan
        self.security = Security.from_options(role, certs or cluster.certs)
        self.client = CoordinatorClient(cluster.served.address, self.security)
        self.incarnation = secrets.randbits(63)
        self.secret = secrets.token_bytes(32)
        self.name, self.session = "", b""
        self.generation = self.policy = 0
        self.shards: list[ShardClient] = []
        self.gradient_of: Callable[[Array], Encoded] = plain
        """What it sends of the right gradient."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for shard in self.shards:
            shard.close()
        self.client.close()

    def join(self) -> Self:
        """Becomes a worker of the job, as any does, and knows its shards."""
        response = self.register()
        self.name, self.session = response.worker, response.session
        self.see_shards()
        return self

    def register(self, **claims: Any) -> pb.RegisterWorkerResponse:
        """Registers with what it says of itself."""
        request = pb.RegisterWorkerRequest(
            incarnation=claims.get("incarnation", self.incarnation),
            host="elsewhere",
            pid=1,
            job_sha256=self.cluster.run.description.job_sha256,
            software=SOFTWARE,
            device="cpu",
            secret=claims.get("secret", self.secret),
        )
        return self.client.register_worker(request)

    def see_shards(self, session: bytes | None = None) -> None:
        """Finds out where the shards are."""
        asked = pb.GetClusterRequest(session=self.session if session is None else session)
        found = self.client.get_cluster(asked)
        self.generation, self.policy = found.generation, found.policy
        for shard in self.shards:
            shard.close()
        self.shards = [
            ShardClient(
                shard.address,
                shard.incarnation,
                self.plan,
                index,
                security=self.security,
                retry=ONE_TRY,
            )
            for index, shard in enumerate(found.shards)
        ]

    def lease(self, done: tuple[pb.BatchReport, ...] = (), received: int = 0) -> pb.Lease:
        """Asks for work, and reports."""
        request = pb.LeaseWorkRequest(
            session=self.session,
            generation=self.generation,
            policy=self.policy,
            done=done,
            received=received,
        )
        return self.client.lease_work(request).lease

    def fence(
        self, shard: int = 0, session: bytes | None = None, generation: int = 0
    ) -> types.Fence:
        """The fence of calls to a shard: its own session and generation, or others."""
        return self.shards[shard].fence(
            generation or self.generation,
            self.policy,
            self.session if session is None else session,
        )

    def push(
        self,
        attempt: types.Attempt,
        shard: int = 0,
        *,
        skipped: bool = False,
        grant: bytes | None = None,
        fence: types.Fence | None = None,
    ) -> PushResult:
        """Pushes the right gradient of a batch, or that it has none, with any proof."""
        batch = from_batch(attempt.batch)
        push = GradientPush(
            batch,
            attempt.attempt,
            0,
            None if skipped else self.gradient(batch, shard),
            grant=attempt.grant if grant is None else grant,
        )
        return self.shards[shard].push(fence or self.fence(shard), push)

    def gradient(self, batch: BatchId, shard: int) -> Gradient:
        """The right one, of parameters that are all zero."""
        options = self.cluster.options
        found = gradient(options, options.number(batch), shard, np.zeros(options.piece, np.float32))
        assert found is not None
        return {name: self.gradient_of(array) for name, array in found.items()}

    def pull(
        self, source: Source, shard: int = 0, decision: types.SignedDecision | None = None
    ) -> Mapping[str, Array]:
        """Whole arenas, of which the shard's part is what it answered."""
        into = {arena.name: np.zeros(arena.length, arena.dtype) for arena in self.plan.arenas}
        self.shards[shard].pull(self.fence(shard), source, into, decision)
        return into

    def versions(self) -> list[int]:
        """Of all shards."""
        return [shard.get_status().version for shard in self.shards]

    def report(self, attempt: types.Attempt, receipts: Sequence[bytes] = ()) -> pb.BatchReport:
        """Says that a batch is done, with any proof."""
        return pb.BatchReport(
            batch=attempt.batch, attempt=attempt.attempt, loss=1.0, receipts=receipts
        )

    def leave(self) -> None:
        """Gives its leases back."""
        self.client.leave_worker(pb.LeaveWorkerRequest(session=self.session, reason="enough"))


def refusal(call: Callable[[], object]) -> PsError | None:
    """The error that refused a call; None if it was not refused."""
    try:
        call()
    except PsError as error:
        return error
    return None
