"""Invariants of every moment and of the end, under all faults."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from coordinator.core.work import Round, RoundsLease, Train
from coordinator.job.job_run import JobRun
from coordinator.records.store import Store
from coordinator.records.stored_values import ENDED, GENERATION
from coordinator.transitions.holding import JobHold
from pserver.core.requests import PushRequest, PushResult, Snapshot, Values
from psrpc.checkpoint.checkpoint import newest_good
from psrpc.checkpoint.load import load_state
from psrpc.core.batch import BatchId
from psrpc.core.commands import Begin, Command, Decision, RoundsAhead, SnapshotOrder
from psrpc.core.errors import AlreadyExists, JobFailed, PsError, StaleGeneration
from psrpc.core.intervals import IntervalSet
from psrpc.core.names import CHECKPOINTS
from psrpc.v1 import coordinator_pb2 as pb
from tests.sim.clock_book import ClockBook
from tests.sim.network import RUN_DIR
from tests.sim.policy_book import PolicyBook, attempts_of
from tests.sim.schedule import Process
from tests.sim.source import POSITIONS
from tests.sim.table_book import TableBook
from tests.sim.table_witness import Contents
from tests.sim.witness import ARENA

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.shard import Shard
    from tests.sim.worker import Worker

NDArray = npt.NDArray[Any]

SLOT = "momentums"

EXACT = 1e-4
"""A batch more or less is a difference of 1; the weights of a round are rounded."""


ROUNDED = 2e-5
"""Most that sums in another order may differ by at the end of a run."""

EXPECTED = (AlreadyExists, StaleGeneration, JobFailed)
"""What processes end by that others have taken the place of, or whose job is over; what is
retryable has been tried for long enough."""


OTHER_WAY = re.compile(
    r"dense is '(allreduce|shards)'|: another plan$|there is no shard \d+ in a job"
)
"""Ends a process that was stopped while its job was resumed with other hosts."""


class Violation(BaseException):
    """A promise was broken; the text says which, by whom and when. No code under test takes it for
    an error of its own."""


class Invariants:
    """Looks at a cluster while it runs. Every method raises Violation."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._witness = cluster.witness
        self._options = cluster.options
        self.policies = PolicyBook(cluster, self.fail)
        self.clocks = ClockBook(cluster, self.fail)
        self.tables = TableBook(cluster, self.fail)
        self._shards: dict[str, tuple[int, int, int]] = {}
        self._workers: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._leases: dict[int, tuple[str, str]] = {}
        self._taken: set[tuple[str, int, str]] = set()
        """Snapshots: by whom, in which generation, which."""
        self._begun: dict[int, tuple[int, Any]] = {}
        self._decided: dict[tuple[int, int], Any] = {}
        self._newest: dict[tuple[int, BatchId], int] = {}
        self._doubled: set[tuple[int, BatchId]] = set()
        """Micro-batches of which two workers have had an attempt at once."""
        self._done = -1
        self.changed: dict[str, dict[int, bytes]] = {}
        """The parameters that an attendant has written, by checkpoint and shard."""
        self._restored: set[str] = set()
        self._checkpoint = ""
        self._point = (0, 0)

    def check_shard(self, shard: Shard, begun: bool) -> None:
        """A shard's parameters, slots and applied-set say the same; its version never goes back
        within a generation, and its generation never; it stages no more than it may."""
        engine, updates = shard.engine, shard.updates
        if engine is None or updates is None:
            return
        # Not its report, which takes longer: this is done at every call.
        standing, staged = engine._held.standing, len(engine._rounds)
        most = 2 * engine.identity.settings.open
        if staged > most:
            self.fail(f"{shard} stages {staged} attempts; at most {most}")
        name = repr(shard)
        now = (standing.generation, standing.version, engine._counters.skipped)
        before = self._shards.get(name)
        if now == before and not begun:
            return
        if before is not None and now[:2] < before[:2]:
            self.fail(f"{name} goes back from (generation, version) {before[:2]} to {now[:2]}")
        self._shards[name] = now
        self.policies.check_shard(shard)
        if begun and staged:
            self.fail(f"{name} begins with {staged} attempts staged")
        if not standing.initialized:
            return
        applied = engine.applied().to_epochs()
        slots = updates.slots()
        self._agree(
            name,
            updates.snapshot()[ARENA],
            velocity_of(slots.elements),
            _counted(shard.index, applied),
            slots.iterations,
        )
        self.tables.check_held(
            name,
            shard.index,
            engine._held.tables,
            updates.snapshot()[ARENA],
            self._witness.expected(applied),
            slots.iterations,
        )
        if begun and engine.identity.settings.rounds:
            # A checkpoint of an async time holds other batches on one shard than on another.
            # The first shard alone has totals.
            positions = [{k: v for k, v in epoch.items() if k != "totals"} for epoch in applied]
            stands = (standing.version, positions if self._options.alike else None)
            there = self._begun.setdefault(standing.generation, stands)
            if there != stands:
                self.fail(
                    f"{name} begins generation {standing.generation} at {stands}, another one at"
                    f" {there}"
                )

    def check_snapshot(
        self, shard: Shard, order: SnapshotOrder, snapshot: Snapshot
    ) -> tuple[Contents, ...] | None:
        """An order is carried out once. A cut agrees on parameters, slots, applied-set and rows;
        returns the rows."""
        taken = (repr(shard), snapshot.values.generation, order.name)
        if taken in self._taken:
            self.fail(f"{taken[0]} takes {order.name} once more, of {snapshot.values.version}")
        self._taken.add(taken)
        slots, part = snapshot.slots, snapshot.values.arrays[ARENA]
        who, applied = f"a snapshot of {shard}", list(snapshot.applied)
        velocity = velocity_of(slots.elements)
        self._agree(who, part, velocity, _counted(shard.index, applied), slots.iterations)
        trained = self._witness.expected(applied)
        return self.tables.check_cut(who, shard.index, snapshot, part, trained)

    def _agree(
        self, who: str, part: NDArray, velocity: NDArray | None, applied: list[Any], updates: int
    ) -> None:
        witness = self._witness
        found, expected = witness.updates(part, velocity), witness.expected(applied)
        # A shard with rows alone has no part of the arenas.
        if len(part) and _differ(found, expected):
            self.fail(
                f"{who} has trained {_counts(found)}; its applied-set says {_counts(expected)}"
            )
        for epoch in applied:
            totals = epoch.get("totals")
            if totals and tuple(totals) != witness.totals(epoch["epoch"], expected):
                self.fail(f"{who} has the totals {totals}; its applied-set is {epoch}")
        if self._options.policy.taken == 1 and len(self._options.policies) == 1:
            batches = sum(expected[witness.entries(batch).start] for batch in witness.batches)
            summed = max(self._options.devices.values()) if self._options.sums else 1
            if not updates <= batches <= updates * summed:
                self.fail(f"{who} has made {updates} updates for {int(batches)} batches")
        if len(part) and witness.torn(part):
            self.fail(f"{who} has a torn pair")

    def check_pull(self, worker: Worker, parameters: NDArray, source: int | str | None) -> None:
        """The pair sums to zero on every shard; in rounds, across all shards."""
        witness = self._witness
        places = worker.source.places
        parts = [places.part(parameters, shard) for shard in places.dense]
        if any(witness.torn(part) for part in parts):
            self.fail(f"{worker.process} pulled a torn pair ({source})")
        if (
            self._options.alike
            and source is not None
            and any(part.tobytes() != parts[0].tobytes() for part in parts)
        ):
            self.fail(f"{worker.process} pulled {source} from shards that differ")

    def check_worker(
        self, worker: Worker, generation: int, versions: tuple[int, ...] | None
    ) -> None:
        """For a worker neither the generation goes back nor, in one, a shard's version."""
        name = repr(worker.process)
        before, held = self._workers.get(name, (0, ()))
        if generation < before:
            self.fail(f"{name} goes back from generation {before} to {generation}")
        if versions is None:
            versions = held if generation == before else ()
        elif generation == before and any(
            new < old for new, old in zip(versions, held, strict=False)
        ):
            self.fail(f"{name} goes back from versions {held} to {versions}")
        self._workers[name] = (generation, versions)

    def check_accepted(self, shard: Shard, header: PushRequest, result: PushResult) -> None:
        """Nothing of another generation or process changes anything, of a batch that was leased
        anew nothing of the lease before, and nothing that is older than the policy allows."""
        if result.outcome in ("already_applied", "too_stale", "one_by_one"):
            if result.outcome == "already_applied":
                self.clocks.count(shard, header)
            return
        self.clocks.check_accepted(shard, header)
        assert shard.engine is not None
        fence, generation = header.fence, shard.engine.report().generation
        if (fence.generation, fence.shard_incarnation) != (generation, shard.incarnation):
            self.fail(
                f"{shard} in generation {generation} takes a push of generation "
                f"{fence.generation} for incarnation {fence.shard_incarnation}"
            )
        settings = self.policies.settings(fence.policy)
        oldest = settings.max_staleness
        if oldest is not None and result.outcome == "applied" and result.staleness > oldest:
            self.fail(f"{shard} applies {header.attempt} of staleness {result.staleness}")
        for attempt in header.attempts:
            key = (generation, attempt.batch)
            newest = self._newest.get(key, 0)
            if attempt.number < newest and key not in self._doubled:
                self.fail(f"{shard} takes {attempt} although attempt {newest} is leased")

    def check_values(self, worker: Worker, values: Values, generation: int) -> None:
        """Parameters are of the generation that they were asked for in."""
        if values.generation != generation:
            self.fail(f"{worker.process} pulled generation {values.generation} in {generation}")

    def check_handed_out(
        self, job_run: JobRun, worker: str, work: Train | Round | RoundsLease
    ) -> None:
        """The coordinator leases; attempts rise. Work goes to workers that reach all shards. A
        batch has a second attempt at the same time only if its worker is stuck, or slow where that
        is asked for."""
        self._check_paced(job_run, work)
        if job_run.members.workers[worker].unreachable:
            self.fail(f"{worker} is given {work} although it cannot reach all shards")
        if isinstance(work, Round):
            self._check_doubled(job_run, work)
        for attempt in attempts_of(work):
            key = (job_run.run.generation, attempt.batch)
            self._newest[key] = max(self._newest.get(key, 0), attempt.number)
        self.policies.handed_out(job_run, worker, work)

    def _check_paced(self, job_run: JobRun, work: Train | Round | RoundsLease) -> None:
        """Where something depends on its results, an epoch is evaluated before the next begins."""
        if not job_run.run.description.paced:
            return
        attempts = attempts_of(work)
        known = {row.epoch for row in job_run.training.epochs.history.rows if row.evaluation}
        for epoch in {attempt.batch.epoch for attempt in attempts}:
            if epoch and epoch - 1 not in known:
                self.fail(f"epoch {epoch} begins, and the one before is not evaluated")

    def _check_doubled(self, job_run: JobRun, work: Round) -> None:
        assert job_run.training.rounds is not None
        micro = job_run.training.rounds._open.find(work.attempt.batch)
        key = (job_run.run.generation, work.attempt.batch)
        again = self._newest.get(key, 0) >= work.attempt.number
        if micro is None or len(micro.attempts) < 2 or again:
            return
        stuck = {line.split()[0] for line in job_run.stuck.lines(0.0)}
        others = {h.worker for n, h in micro.attempts.items() if n != work.attempt.number}
        if not (job_run.run.settings.speculate or others <= stuck):
            self.fail(f"{work} is a second attempt, and {others} can go on")
        self._doubled.add(key)

    def check_lease(self, worker: Worker, lease: pb.Lease) -> None:
        """An attempt is of one batch, and goes to one worker."""
        self.policies.check_lease(lease)
        attempts = list(lease.train.batches)
        if lease.HasField("round"):
            attempts.append(lease.round.attempt)
        attempts += [ahead.attempt for ahead in lease.rounds.attempts]
        for attempt in attempts:
            batch = attempt.batch
            given = (repr(worker.process), f"{batch.epoch}:{batch.first}")
            before = self._leases.setdefault(attempt.attempt, given)
            if before != given:
                self.fail(f"attempt {attempt.attempt} was given to {before}, then to {given}")

    def check_told(self, store: Store, command: Command) -> None:
        """Facts that a restarted coordinator needs are stored before others get them."""
        if isinstance(command, Begin) and (store.get(GENERATION) or 0) < command.generation:
            self.fail(f"{command} is told before its generation is stored")
        if isinstance(command, Begin):
            self.policies.check_told(store, command)
        if isinstance(command, Decision):
            self._check_decision(store, command)
        if isinstance(command, RoundsAhead):
            for decision in command.decisions:
                self._check_decision(store, decision)

    def _check_decision(self, store: Store, decision: Decision) -> None:
        stored = store.last_decision(decision.generation)
        known = stored is not None and (stored.generation, stored.round) >= (
            decision.generation,
            decision.round,
        )
        if not known and store.decision_ahead(decision.generation, decision.round) != decision:
            self.fail(f"{decision} is told before it is stored")
        key = (decision.generation, decision.round)
        there = self._decided.get(key)
        if there is None:
            self._decided[key] = decision
            self.policies.check_decision(self._cluster.policy, decision)
        elif there != decision:
            self.fail(f"round {key} was decided as {there}, then as {decision}")

    def check_ending(self, process: Process, why: object) -> None:
        """No process breaks a rule: none ends by an error that only wrong calls get."""
        if self._options.moves and OTHER_WAY.search(str(why)):
            return
        if isinstance(why, PsError) and not isinstance(why, EXPECTED) and not why.retryable:
            self.fail(f"{process} ends by {why!r}")

    def check_drained(self, store: Store) -> None:
        """A run whose coordinator drains has not ended: the same command goes on."""
        if store.get(ENDED) is not None:
            self.fail(f"a drained run is marked as ended: {store.get(ENDED)}")

    def check_progress(self, generation: int, step: int) -> None:
        """The status page never goes back, over restarts of the coordinator too."""
        if (generation, step) < self._point:
            self.fail(f"the job goes back from {self._point} to {(generation, step)}")
        self._point = (generation, step)

    def check_done(self, job_run: JobRun) -> None:
        """Async: what the ledger holds for done is on every shard of the generation."""
        ledger = job_run.training.ledger
        if ledger is None or not job_run.complete or ledger.span.batches == self._done:
            return
        self._done = ledger.span.batches
        for name, engine in self._cluster.engines(job_run.run.generation):
            applied = engine.applied()
            for batch in self._witness.batches:
                if ledger._todo.is_done(batch) and not applied.contains(batch):
                    self.fail(f"{batch} is held for done, and {name} does not have it")

    def check_hold(self, job_run: JobRun, hold: JobHold) -> None:
        """A job that holds stands at its limit: all shards have applied these batches and no other,
        a checkpoint has exactly them, and an epoch that has ended is evaluated."""
        witness, limit = self._witness, job_run.training.limit
        assert limit is not None
        # The policy may have changed since the last round.
        most = max(limit, 1) - 1 + max(policy.open or 1 for policy in self._options.policies)
        if limit and not limit <= hold.at <= most:
            self.fail(f"the job holds at batch {hold.at}; its limit is {limit}")
        stands = {
            name: {e["epoch"]: e["applied"] for e in engine.applied().to_epochs()}
            for name, engine in self._cluster.engines(job_run.run.generation)
            if job_run.complete
        }
        if not self._cluster.faults.fired["rot"]:
            storage, directory = self._cluster.view(), RUN_DIR / hold.checkpoint
            for shard in range(witness.plan.shards):
                state = load_state(directory, witness.plan, shard, storage=storage)
                stands[f"shard {shard} of {hold.checkpoint}"] = {
                    e["epoch"]: e["applied"] for e in state.applied
                }
        for name, applied in stands.items():
            held = IntervalSet()
            for epoch, positions in applied.items():
                for start, stop in positions:
                    first = epoch * self._options.records
                    held.add(first + start, first + stop)
            entries = map(witness.entries, witness.batches)
            batches = sum(held.contains(one.start, one.stop) for one in entries)
            if batches != hold.at:
                self.fail(f"the job holds at batch {hold.at}, and {name} has {batches}")
        ended = hold.at == hold.epoch * self._options.batches
        if ended and hold.epoch and self._options.eval_records and not hold.evaluation:
            self.fail(f"the job holds at the end of epoch {hold.epoch}, which is not evaluated")

    def check_changed(self, job_run: JobRun) -> None:
        """A hold that ends with a changed checkpoint ends with it on every shard."""
        last = job_run.holding._last
        if last is None or not last.restore or last.restore in self._restored:
            return
        if not job_run.complete:
            return
        self._restored.add(last.restore)
        for name, shard, values, *_ in self._cluster.final_parts():
            if values.tobytes() != self.changed[last.restore][shard]:
                self.fail(f"{name} begins with something else than {last.restore}")

    def begin(self, job_run: JobRun) -> None:
        """A coordinator begins. What it knows of the newest checkpoint may be an older one."""
        self._checkpoint = job_run.checkpoints.newest

    def check_checkpoint(self, name: str) -> None:
        """A checkpoint that is said to be committed outlives a power cut."""
        if name and name != self._checkpoint:
            self._checkpoint = name
            lacking = self._cluster.disk.lacking(RUN_DIR / name)
            if lacking:
                self.fail(f"{name} is said to be committed, and {lacking} would not last")
            self.tables.check_committed(name)

    def check_end(self) -> None:
        """The job is done: every batch is in every shard, once; sync runs have the bits that
        they have without faults."""
        witness, options = self._witness, self._options
        known = options.known and not self.changed
        final = witness.final() if known and options.policy.rounds else None
        whole = witness.whole()
        parts = list(self._cluster.final_parts())
        there = {one.shard: one.values for one in parts}
        for name, shard, part, velocity, tables in parts:
            found = witness.updates(part, velocity)
            if len(part) and _differ(found, whole):
                self.fail(f"{name} ends with {_counts(found)}; expected {_counts(whole)}")
            if tables.specs:
                with_rows = there.get(witness.places.partner(shard), part)
                self.tables.check_trained(name, shard, tables, with_rows, whole)
            if final is not None:
                bits, slots, rows = final
                if tables.specs and options.exact:
                    self.tables.check_bits(name, tables, rows[shard])
                if not len(part):
                    continue
                if not options.exact:
                    self._check_close(name, part, bits)
                    self._check_close(name, velocity, slots)
                    continue
                if part.tobytes() != bits.tobytes():
                    self.fail(f"{name} ends with other bits than without faults")
                if velocity is not None and velocity.tobytes() != _bytes(slots):
                    self.fail(f"{name} ends with other slots than without faults")

        self.policies.check_end(self._cluster.job_run.run)
        self._check_saved(whole)
        self._check_evaluated()
        self._check_history()

    def _check_close(self, name: str, found: NDArray | None, exact: NDArray | None) -> None:
        """Sums in another order differ by their rounding alone."""
        if found is not None and exact is not None and np.abs(found - exact).max() > ROUNDED:
            self.fail(f"{name} ends {np.abs(found - exact).max():g} away from a run without faults")

    def _check_saved(self, whole: NDArray) -> None:
        """The newest checkpoint holds the final state."""
        if self._cluster.faults.fired["rot"]:
            return
        storage = self._cluster.view()
        found = newest_good(RUN_DIR / CHECKPOINTS, storage=storage).directory
        plan, places = self._witness.plan, self._witness.places
        states = [load_state(found, plan, shard, storage=storage) for shard in range(plan.shards)]
        for shard in places.dense:
            velocity = velocity_of(states[shard].elements)
            sums = self._witness.updates(states[shard].values[ARENA], velocity)
            if _differ(sums, whole):
                self.fail(f"{found} holds {_counts(sums)} of shard {shard}; {_counts(whole)}")
        for shard in places.rows:
            tables = self.tables.read(f"{CHECKPOINTS}/{found.name}", shard)
            part = states[places.partner(shard)].values[ARENA]
            self.tables.check_trained(found, shard, tables, part, whole)

    def _check_history(self) -> None:
        """Every epoch has one row, of each of its records once."""
        rows, witness = self._cluster.history, self._witness
        if [row.epoch for row in rows] != list(range(self._options.epochs)):
            self.fail(f"the history is of the epochs {[row.epoch for row in rows]}")
        for row in rows:
            loss, records, positions = witness.totals(row.epoch, witness.whole())
            known = {}
            if records:  # otherwise every batch was skipped
                known = {"loss": loss / records, "records": records, POSITIONS: positions}
            if row.training != known:
                self.fail(f"epoch {row.epoch} has {dict(row.training)}; expected {known}")
        if self._options.eval_records and not rows[-1].evaluation:
            self.fail(f"the last epoch has no evaluation: {rows[-1]}")

    def _check_evaluated(self) -> None:
        """The final evaluation is there, and is of the final state."""
        if not self._options.eval_records:
            return
        values = self._cluster.results.get("final")
        if values is None:
            self.fail(f"the final state is not evaluated, only {sorted(self._cluster.results)}")
        elif self._options.alike or not self._options.momentum:
            parts = [one.values for one in self._cluster.final_parts() if len(one.values)]
            loss = sum(float(part[: self._witness.rows].sum()) for part in parts)
            if len(parts) == len(self._witness.places.dense) and abs(values["loss"] - loss) > EXACT:
                self.fail(f"the final evaluation is {values['loss']}; expected {loss}")

    def fail(self, what: str) -> NoReturn:
        """A promise was broken."""
        raise Violation(f"at {self._cluster.schedule.now():.3f} s: {what}")


def velocity_of(slots: Mapping[str, Mapping[str, NDArray]]) -> NDArray | None:
    """That of a shard's part of the arenas; None without momentum, or without a part."""
    return slots.get(SLOT, {}).get(ARENA)


def _counted(shard: int, applied: Sequence[Any]) -> list[Any]:
    """The applied-set of a shard with the totals of the first alone: one that began from another
    plan's checkpoint keeps those of that moment, which are not read."""
    if not shard:
        return list(applied)
    return [{key: of for key, of in epoch.items() if key != "totals"} for epoch in applied]


def _bytes(array: NDArray | None) -> bytes:
    return b"" if array is None else array.tobytes()


def _differ(one: NDArray, other: NDArray) -> bool:
    return bool(np.abs(one - other).max() > EXACT)


def _counts(values: NDArray) -> str:
    return "[" + " ".join(f"{value:g}" for value in values) + "]"
