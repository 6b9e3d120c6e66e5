"""Shards and workers without tensors, in simulated time: what shards hold is which batches they
have, what workers decide is decided by the real workers' protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psrpc import SOFTWARE
from psrpc.core.batch import BatchId
from psrpc.core.commands import Begin, Release, Revocation, SnapshotOrder
from psrpc.core.errors import JobFailed, NotReady, PsError, StaleGeneration, Unreachable
from psrpc.core.intervals import IntervalSet
from psrpc.core.shard_reports import HeldState, ShardFigures, ShardHeartbeat, ShardRegistration
from psrpc.security.signatures import GRANT_BYTES, SECRET_BYTES, receipts_of
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.wire.shard_reports import to_heartbeat, to_ready, to_registration, to_watch
from tests.coordinator.builders import SHA
from tests.sim.schedule import Process, Signal, Steps
from worker.protocol import actions as does
from worker.protocol.conduct import conduct
from worker.protocol.done import Stopped
from worker.protocol.membership import WorkerMembership

if TYPE_CHECKING:
    from tests.sim_scale.cluster import Cluster

BEAT_S = 1.0
AGAIN_S = 0.3


class Shard:
    """One start of a shard's process."""

    def __init__(self, cluster: Cluster, process: Process, index: int) -> None:
        self.process = process
        self.index = index
        self.applied: dict[int, IntervalSet] = {}
        self.version = 0
        self.initialized = False
        self.generation = 0
        self.key = b""
        self._cluster = cluster
        self._refused: set[str] = set()
        self._revoked = 0
        self._known_to: object = None

    def live(self) -> Steps:
        """Gives signs of life; registers and watches wherever a new coordinator serves."""
        cluster = self._cluster
        yield cluster.schedule.sleep(BEAT_S * self.index / cluster.options.shards)
        while True:
            try:
                if self._known_to is not cluster.coordinator:
                    yield from self._register()
                else:
                    yield from self._beat()
                    yield cluster.schedule.sleep(BEAT_S)
            except PsError:
                self._known_to = None
                yield cluster.schedule.sleep(AGAIN_S)

    def push(self, worker: str, generation: int, batch: BatchId, attempt: int) -> None:
        """Applies a batch once. Raises StaleGeneration or Unreachable."""
        if not self.process.alive or self.process.paused:
            raise Unreachable(f"shard {self.index} is away")
        if generation != self.generation or worker in self._refused:
            raise StaleGeneration(f"shard {self.index} refuses {worker}")
        done = self.applied.setdefault(batch.epoch, IntervalSet())
        if not done.overlaps(batch.first, batch.first + batch.count):
            done.add(batch.first, batch.first + batch.count)
            self.version += 1
            self._cluster.applied(generation, batch, attempt)

    def _held(self) -> HeldState:
        return HeldState(self.process.incarnation, self.generation, self.initialized, self.version)

    def _register(self) -> Steps:
        cluster, number = self._cluster, self.process.incarnation
        coordinator = cluster.coordinator
        registration = ShardRegistration(
            self.index, number, f"10.0.0.{self.index}:1", "here", 1, SOFTWARE
        )
        yield cluster.call(self.process, "RegisterShard", to_registration(registration))
        if coordinator is cluster.coordinator:
            coordinator.watch(to_watch(self.index, self._held()), self._obey_soon)
            self._known_to = coordinator

    def _beat(self) -> Steps:
        figures = ShardFigures(version=self.version, generation=self.generation)
        beat = ShardHeartbeat(self.index, self.process.incarnation, figures, revoked=self._revoked)
        answer = yield self._cluster.call(self.process, "HeartbeatShard", to_heartbeat(beat))
        if answer.unknown:
            raise NotReady("the coordinator does not know this shard")

    def _obey_soon(self, command: Any) -> None:
        self._cluster.schedule.after(self._cluster.latency(), self.process, self._obey, command)

    def _obey(self, command: Any) -> None:
        match command:
            case Begin():
                self._begin(command)
            case Revocation():
                self._refused.add(command.worker)
                self._revoked = max(self._revoked, command.number)
            case SnapshotOrder() if command.write:
                self._cluster.saved[command.name, self.index] = self._copy(), self.version
                report = pb.ReportSnapshotRequest(
                    shard=self.index,
                    incarnation=self.process.incarnation,
                    generation=self.generation,
                    name=command.name,
                    version=self.version,
                    file=f"shard-{self.index}.safetensors",
                    nbytes=1,
                    sha256="0" * 64,
                )
                self.process.spawn(self._say("ReportSnapshot", report))
            case SnapshotOrder() | Release():
                pass

    def _begin(self, begin: Begin) -> None:
        assert begin.keys is not None
        if begin.restore:
            name = begin.restore.rpartition("/")[2]
            saved, self.version = self._cluster.saved[name, self.index]
            self.applied = {epoch: IntervalSet(positions) for epoch, positions in saved.items()}
            self.initialized = True
        elif not begin.keep:
            self.applied, self.version, self.initialized = {}, 0, False
        self.generation, self.key = begin.generation, begin.keys.grant
        self._refused.clear()
        self._revoked = 0
        applied: Any = [
            {"epoch": epoch, "applied": [list(one) for one in positions], "skipped": []}
            for epoch, positions in self.applied.items()
        ]
        ready = to_ready(self.index, self._held(), applied)
        self.process.spawn(self._say("ReportShardReady", ready))

    def _copy(self) -> dict[int, list[tuple[int, int]]]:
        return {epoch: list(positions) for epoch, positions in self.applied.items()}

    def _say(self, method: str, request: Any) -> Steps:
        while True:
            try:
                yield self._cluster.call(self.process, method, request)
                return
            except PsError as error:
                if not error.retryable:
                    return
            yield self._cluster.schedule.sleep(AGAIN_S)


class Worker:
    """One start of a worker's process."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self.process = process
        self._cluster = cluster
        secret = process.incarnation.to_bytes(SECRET_BYTES)
        self._membership = WorkerMembership(process.incarnation, secret)
        self._ahead: list[Any] = []
        self._came = Signal(cluster.schedule)

    def live(self) -> Steps:
        """Takes part until the job ends."""
        self.process.spawn(self._beat())
        actions = conduct()
        action = next(actions)
        while True:
            try:
                answer = yield from self._perform(action)
            except (PsError, Stopped) as error:
                try:
                    action = actions.throw(error)
                except (JobFailed, Stopped):
                    return
            else:
                action = actions.send(answer)

    def _perform(self, action: does.Action) -> Steps:
        cluster, membership = self._cluster, self._membership
        match action:
            case does.Register():
                request = membership.register("here", 1, SHA, "cpu")
                membership.registered((yield from self._persist("RegisterWorker", request)))
            case does.Join():
                while True:
                    try:
                        joined = yield from self._persist("GetCluster", membership.get_cluster())
                        break
                    except NotReady:
                        yield cluster.schedule.sleep(AGAIN_S)
                        membership.check()
                membership.joined(joined)
            case does.Rejoin():
                membership.rejoins()
                self._ahead = []
                yield cluster.schedule.sleep(AGAIN_S)
            case does.Lease():
                return (yield from self._lease())
            case does.LeaseAhead():
                holder: list[Any] = []
                self._ahead = holder
                self.process.spawn(self._lease_into(holder))
            case does.TakeLease():
                while not self._ahead:
                    yield self._came.wait()
                if isinstance(self._ahead[0], Exception):
                    raise self._ahead[0]
                return self._ahead[0]
            case does.Compute():
                yield cluster.schedule.sleep(cluster.batch_s())
                membership.check()
                return does.Computed(1.0, True)
            case does.PushPull(batch=batch, attempt=attempt):
                return (yield from self._push(batch, attempt))
            case does.Done(batch=done):
                membership.done(done)
            case does.Initialize():
                for shard in cluster.shards:
                    shard.initialized = True
                return pb.InitializeDone()
            case does.ReportWork(done=work):
                yield from self._persist("ReportWork", membership.report(work))
        return None

    def _push(self, batch: BatchId, attempt: int) -> Steps:
        """Reaches some shards now and the others later, unless the worker dies in between."""
        cluster, membership = self._cluster, self._membership
        worker, generation = membership.worker, membership.generation
        order = cluster.shards
        cut = cluster.random.randrange(len(order) + 1)
        for part in (range(cut), range(cut, len(order))):
            for index in part:
                while True:
                    try:
                        cluster.shards[index].push(worker, generation, batch, attempt)
                        break
                    except Unreachable:
                        yield cluster.schedule.sleep(AGAIN_S)
                        membership.check()
            yield cluster.schedule.sleep(cluster.latency())
        membership.check()
        key, shards = cluster.shards[0].key, len(order)
        joined = receipts_of(key, worker, generation, batch, attempt, shards, False)
        size = GRANT_BYTES
        return does.Pushed(
            receipts=tuple(joined[at : at + size] for at in range(0, len(joined), size))
        )

    def _lease(self) -> Steps:
        asked = self._membership.lease()
        lease = (yield from self._persist("LeaseWork", asked.request)).lease
        self._membership.leased(asked, lease)
        return lease

    def _lease_into(self, holder: list[Any]) -> Steps:
        try:
            holder.append((yield from self._lease()))
        except (PsError, Stopped) as error:
            holder.append(error)
        self._came.send()

    def _beat(self) -> Steps:
        cluster, membership = self._cluster, self._membership
        yield cluster.schedule.sleep(BEAT_S * cluster.random.random())
        while True:
            beat = membership.beat("", pb.WorkerTimes(), {}, None)
            if beat is not None:
                try:
                    heard = yield cluster.call(self.process, "HeartbeatWorker", beat.request)
                except PsError:
                    pass
                else:
                    membership.heard(beat, heard)
            yield cluster.schedule.sleep(BEAT_S)

    def _persist(self, method: str, request: Any) -> Steps:
        while True:
            try:
                return (yield self._cluster.call(self.process, method, request))
            except PsError as error:
                if not isinstance(error, Unreachable) and not (
                    isinstance(error, NotReady) and method != "GetCluster"
                ):
                    raise
            self._membership.check()
            yield self._cluster.schedule.sleep(AGAIN_S)
