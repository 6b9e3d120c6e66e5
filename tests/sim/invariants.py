"""What must hold at every moment and at the end, whatever happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pserver.requests import Snapshot
from psrpc.v1 import coordinator_pb2 as pb
from tests.sim.witness import ARENA

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.shard import Shard
    from tests.sim.worker import Worker

NDArray = npt.NDArray[Any]

SLOT = "momentums"

EXACT = 1e-4
"""A batch more or less is a difference of 1; the weights of a round are rounded."""


class Violation(Exception):
    """A promise was broken; the text says which, by whom and when."""


class Invariants:
    """Looks at a cluster while it runs. Every method raises Violation."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._witness = cluster.witness
        self._options = cluster.options
        self._shards: dict[str, tuple[int, int, int]] = {}
        self._workers: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._leases: dict[int, tuple[str, str]] = {}
        self._begun: dict[int, tuple[int, Any]] = {}
        self._decided: dict[tuple[int, int], Any] = {}
        self._point = (0, 0)

    def check_shard(self, shard: Shard, begun: bool) -> None:
        """A shard's parameters, slots and applied-set say the same; its version never goes back
        within a generation, and its generation never; it stages no more than it may."""
        engine, updates = shard.engine, shard.updates
        if engine is None or updates is None:
            return
        report = engine.report()
        most = 2 * self._options.replicas
        if report.staged_now > most:
            self._fail(f"{shard.process} stages {report.staged_now} attempts; at most {most}")
        name = repr(shard.process)
        counters = report.counters
        now = (report.generation, report.version, counters.skipped)
        before = self._shards.get(name)
        if now == before and not begun:
            return
        if before is not None and now[:2] < before[:2]:
            self._fail(f"{name} goes back from (generation, version) {before[:2]} to {now[:2]}")
        self._shards[name] = now
        if not report.initialized:
            return
        applied = engine.applied().to_epochs()
        slots = updates.slots()
        self._agree(
            name,
            updates.snapshot()[ARENA],
            slots.elements[SLOT][ARENA] if self._options.momentum else None,
            applied,
            slots.iterations,
        )
        if begun and self._options.mode == "sync":
            stands = (report.version, applied)
            there = self._begun.setdefault(report.generation, stands)
            if there != stands:
                self._fail(
                    f"{name} begins generation {report.generation} at {stands}, another at {there}"
                )

    def check_snapshot(self, shard: Shard, snapshot: Snapshot) -> None:
        """A cut agrees on parameters, slots and applied-set."""
        slots = snapshot.slots
        self._agree(
            f"a snapshot of {shard.process}",
            snapshot.values.arrays[ARENA],
            slots.elements[SLOT][ARENA] if self._options.momentum else None,
            list(snapshot.applied),
            slots.iterations,
        )

    def _agree(
        self, who: str, part: NDArray, velocity: NDArray | None, applied: list[Any], updates: int
    ) -> None:
        witness = self._witness
        found, expected = witness.updates(part, velocity), witness.expected(applied)
        if _differ(found, expected):
            self._fail(
                f"{who} has trained {_counts(found)}; its applied-set says {_counts(expected)}"
            )
        if self._options.mode == "async" and updates != expected.sum():
            self._fail(f"{who} has made {updates} updates for {int(expected.sum())} batches")
        if witness.torn(part):
            self._fail(f"{who} has a torn pair")

    def check_pull(self, worker: Worker, parameters: NDArray, source: int | str | None) -> None:
        """The pair sums to zero on every shard; in sync mode, across all shards."""
        witness = self._witness
        parts = [witness.shard_part(parameters, k) for k in range(self._options.shards)]
        if any(witness.torn(part) for part in parts):
            self._fail(f"{worker.process} pulled a torn pair ({source})")
        if self._options.mode == "sync" and any(
            part.tobytes() != parts[0].tobytes() for part in parts
        ):
            self._fail(f"{worker.process} pulled {source} from shards that differ")

    def check_worker(
        self, worker: Worker, generation: int, versions: tuple[int, ...] | None
    ) -> None:
        """For a worker neither the generation goes back nor, in one, a shard's version."""
        name = repr(worker.process)
        before, held = self._workers.get(name, (0, ()))
        if generation < before:
            self._fail(f"{name} goes back from generation {before} to {generation}")
        if versions is None:
            versions = held if generation == before else ()
        elif generation == before and any(
            new < old for new, old in zip(versions, held, strict=False)
        ):
            self._fail(f"{name} goes back from versions {held} to {versions}")
        self._workers[name] = (generation, versions)

    def check_lease(self, worker: Worker, lease: pb.Lease) -> None:
        """An attempt is of one batch, and goes to one worker."""
        attempts = list(lease.train.batches)
        if lease.HasField("round"):
            attempts.append(lease.round.attempt)
        for attempt in attempts:
            batch = attempt.batch
            given = (repr(worker.process), f"{batch.epoch}:{batch.first}")
            before = self._leases.setdefault(attempt.attempt, given)
            if before != given:
                self._fail(f"attempt {attempt.attempt} was given to {before}, then to {given}")

    def check_decision(self, decision: Any) -> None:
        """A round is decided once, and known to nobody before it is stored."""
        key = (decision.generation, decision.round)
        there = self._decided.setdefault(key, decision)
        if there != decision:
            self._fail(f"round {key} was decided as {there}, then as {decision}")

    def check_progress(self, generation: int, step: int) -> None:
        """What the status page says never goes back, over restarts of the coordinator too."""
        if (generation, step) < self._point:
            self._fail(f"the job goes back from {self._point} to {(generation, step)}")
        self._point = (generation, step)

    def check_end(self) -> None:
        """The job is done: every batch is in every shard, once; sync runs have the bits that
        they have without faults."""
        witness, options = self._witness, self._options
        final = witness.final() if options.mode == "sync" else None
        whole = np.zeros(witness.rows, np.float32)
        for index, batch in enumerate(witness.batches):
            whole[index] = batch not in witness.skipped
        for name, part, velocity in self._cluster.final_parts():
            found = witness.updates(part, velocity)
            if _differ(found, whole):
                self._fail(f"{name} ends with {_counts(found)}; expected {_counts(whole)}")
            if final is not None:
                bits, slots = final
                if part.tobytes() != bits.tobytes():
                    self._fail(f"{name} ends with other bits than without faults")
                if velocity is not None and slots is not None:
                    if velocity.tobytes() != slots.tobytes():
                        self._fail(f"{name} ends with other slots than without faults")

    def _fail(self, what: str) -> None:
        raise Violation(f"at {self._cluster.schedule.now():.3f} s: {what}")


def _differ(one: NDArray, other: NDArray) -> bool:
    return bool(np.abs(one - other).max() > EXACT)


def _counts(values: NDArray) -> str:
    return "[" + " ".join(f"{value:g}" for value in values) + "]"
