"""Invariants of policies: a change is done wholly or not at all, whatever dies meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt

from coordinator.core.run import Followed, Run
from coordinator.core.work import Round, RoundsLease, Train, TrainingPosition
from coordinator.job.job_run import JobRun
from coordinator.records.store import Store
from coordinator.records.stored_values import POLICIES
from coordinator.schedule.ledger import Ledger
from psrpc.checkpoint.checkpoint import newest_good
from psrpc.checkpoint.load import load_state
from psrpc.core.commands import Attempt, Begin, Decision
from psrpc.core.names import CHECKPOINTS
from psrpc.core.policy import Policy
from psrpc.v1 import coordinator_pb2 as pb
from tests.sim.network import RUN_DIR

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.shard import Shard

NDArray = npt.NDArray[np.float32]

HALF = 0.5
"""An entry is above this once its record was trained."""


class PolicyBook:
    """Which policy has which number, who obeys which, and what was done under it."""

    def __init__(self, cluster: Cluster, fail: Callable[[str], NoReturn]) -> None:
        """``fail`` raises Violation."""
        self._cluster = cluster
        self._options = cluster.options
        self._fail = fail
        self._known: dict[int, Policy] = {1: cluster.options.policy}
        self._newest = 1
        self._begun = 0
        self._seen: tuple[Followed, ...] = ()
        self._decided: dict[int, Counter[int]] = {}
        """By generation: how often each entry of the witness was in a decision."""
        self._done: dict[int, NDArray] = {}
        """By attempt of ssp: what was done when it was leased."""

    def settings(self, number: int) -> Policy:
        """The policy of a number."""
        if number not in self._known:
            self._fail(f"there is no policy {number}; known are {self._known}")
        return self._known[number]

    def check_run(self, job_run: JobRun) -> None:
        """A number means one policy for ever, and none before the newest stands again. Nothing is
        lost by a change: the state that it began from is saved, and all shards have the same."""
        run = job_run.run
        if run.policies is not self._seen:
            self._seen = run.policies
            self._check_policies(run)
        if self._begun != run.generation and job_run.complete:
            self._begun = run.generation
            self._check_step(run, job_run.training.span)

    def _check_policies(self, run: Run) -> None:
        if run.policy < self._newest:
            self._fail(f"policy {run.policy} stands after policy {self._newest}")
        for followed in run.policies:
            there = self._known.setdefault(followed.number, followed.settings)
            if there != followed.settings:
                self._fail(f"policy {followed.number} was {there}, and is {followed.settings}")
        if run.policy > self._newest:
            self._newest = run.policy
            self._cluster.counts["changes made"] += 1
            self._check_drained(run)

    def _check_step(self, run: Run, span: TrainingPosition) -> None:
        """A policy begins at the global step that it is stored with."""
        if not run.policies or self._cluster.faults.fired["rot"]:
            return
        newest = run.policies[-1]
        if span.batches == newest.batches and span.step != newest.step:
            self._fail(f"{newest} begins at step {span.step}; it is stored with {newest.step}")

    def _check_drained(self, run: Run) -> None:
        witness, cluster = self._cluster.witness, self._cluster
        held = {
            name: witness.expected(engine.applied().to_epochs())
            for generation in (run.generation - 1, run.generation)
            for name, engine in cluster.engines(generation)
            if engine.report().initialized
        }
        if len({entries.tobytes() for entries in held.values()}) > 1:
            shown = {name: int(entries.sum()) for name, entries in held.items()}
            self._fail(f"policy {run.policy} begins, and shards have applied {shown} records")
        if cluster.faults.fired["rot"]:
            return
        storage = cluster.view()
        found = newest_good(RUN_DIR / CHECKPOINTS, storage=storage).directory
        for shard in range(witness.plan.shards):
            state = load_state(found, witness.plan, shard, storage=storage)
            saved = witness.expected(state.applied)
            for name, entries in held.items():
                if (saved != entries).any():
                    self._fail(
                        f"policy {run.policy} begins with {int(saved.sum())} records of shard "
                        f"{shard} in {found.name}, and {name} has applied {int(entries.sum())}"
                    )

    def check_told(self, store: Store, begin: Begin) -> None:
        """No shard begins under a policy that a restarted coordinator would not know."""
        stored = {1, *(followed["number"] for followed in store.get(POLICIES) or ())}
        if begin.policy not in stored:
            self._fail(f"{begin} is told before its policy is stored")

    def check_shard(self, shard: Shard) -> None:
        """A shard at a generation obeys the policy that the generation's number names."""
        assert shard.engine is not None
        identity = shard.engine.identity
        if identity.policy and identity.settings != self.settings(identity.policy):
            self._fail(
                f"{shard} obeys {identity.settings} as policy {identity.policy}, which is "
                f"{self.settings(identity.policy)}"
            )

    def check_lease(self, lease: pb.Lease) -> None:
        """A lease is of the mode that the number of its policy names."""
        rounds, work = self.settings(lease.policy).rounds, lease.WhichOneof("work")
        if work in ("round", "rounds", "train") and (work != "train") != rounds:
            self._fail(
                f"{lease.WhichOneof('work')} was leased under policy {lease.policy}, which is "
                f"{self.settings(lease.policy)}"
            )

    def handed_out(self, job_run: JobRun, worker: str, work: Train | Round | RoundsLease) -> None:
        """The coordinator leases: under the job's first policy, nothing that its rule leaves to
        the next; in ssp, nothing that is too far ahead."""
        attempts = attempts_of(work)
        if self._options.then is not None and job_run.run.policy == 1:
            for attempt in attempts:
                if attempt.batch.epoch >= self._options.then_after:
                    self._fail(f"{attempt} is leased before the job's rule has changed its policy")
        staleness, ledger = job_run.run.settings.staleness, job_run.training.ledger
        if staleness is None or ledger is None or not isinstance(work, Train):
            return
        if work.clock is not None:
            self._cluster.invariants.clocks.handed_out(job_run, worker, work)
            return
        if attempts[0].number not in self._done:
            self._check_clocks(ledger, worker, staleness)
        done = self._done_by(ledger)
        for attempt in attempts:
            self._done.setdefault(attempt.number, done)

    def _check_clocks(self, ledger: Ledger, worker: str, staleness: int) -> None:
        assert ledger.clocks is not None
        clocks = ledger.clocks._clocks
        mine, held = clocks[worker], len(ledger._holders[worker].leases)
        if not mine.holds:
            self._fail(f"{worker} gets work of ssp, and others do not wait for it")
        least = min(clock.steps for clock in clocks.values() if clock.holds)
        ahead = mine.steps + held - 1 - least
        if ahead > staleness:
            self._fail(f"{worker} is leased work {ahead} steps ahead; at most {staleness}")

    def _done_by(self, ledger: Ledger) -> NDArray:
        witness = self._cluster.witness
        done = np.zeros(witness.rows, np.float32)
        for batch in witness.batches:
            done[witness.entries(batch)] = ledger._todo.is_done(batch) and (
                batch not in witness.skipped
            )
        return done

    def check_fresh(self, who: object, attempt: int, part: NDArray) -> None:
        """Ssp, without clocks: what a gradient was computed from has all that was done when its
        batch was leased, on every shard."""
        done = self._done.get(attempt)
        if done is None:
            return
        lacking = int(((done > 0) & (np.abs(part[: len(done)]) < HALF)).sum())
        if lacking:
            self._fail(f"{who} computes attempt {attempt} without {lacking} records done before")

    def check_decision(self, policy: Policy, decision: Decision) -> None:
        """A round takes as much as it may, and nothing that another of its generation took."""
        entries = self._decided.setdefault(decision.generation, Counter())
        taken = 0
        for attempt in decision.attempts:
            span = self._cluster.witness.entries(attempt.batch)
            taken += attempt.batch.count
            entries.update(range(span.start, span.stop))
        twice = [entry for entry, times in entries.items() if times > 1]
        if twice:
            self._fail(f"{decision} takes records {twice} once more")
        most = policy.taken * self._options.batch_records
        if taken > most:
            self._fail(f"{decision} takes {taken} records; a round of {policy} has at most {most}")

    def check_end(self, run: Run) -> None:
        """The job is done: it has followed its rule."""
        then = self._options.then
        if then is not None and run.settings != then:
            self._fail(f"the job ends under {run.settings}; its rule says {then}")


def attempts_of(work: Train | Round | RoundsLease) -> tuple[Attempt, ...]:
    """The attempts that a worker is leased."""
    match work:
        case Train():
            return work.batches
        case Round():
            return (work.attempt,)
        case RoundsLease():
            return tuple(attempt for _, attempt in work.attempts)
