"""Where a simulated worker's gradients come from: the witness, in simulated time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pserver.core.requests import PushRequest, Values
from pserver.core.table_ids import TableIds
from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId
from psrpc.core.encoding import plain
from psrpc.core.plan import Plan
from psrpc.core.tables import Rows
from psrpc.v1 import coordinator_pb2 as pb
from tests.sim.table_witness import PAIR
from tests.sim.witness import ARENA, NDArray, Places
from tests.worker.fakes import FakeResult, FakeSource
from worker.data.source import Array
from worker.embedding.row_sets import ReceivedRows, RowSets
from worker.embedding.rows import RowsNeeded
from worker.step.gradient_source import PullSnapshot

if TYPE_CHECKING:
    from tests.sim.worker import Worker

NOT_READ = 0.1
"""How often a batch has not been read ahead."""

POSITIONS = "positions"
"""The metric of training data: the sum of the positions of the records that count."""

ROWS_NBYTES = 4096
"""Of a batch; some have more."""


class Source(FakeSource):
    """Knows by itself of which versions the parameters and rows are that it computes from."""

    def __init__(self, worker: Worker) -> None:
        self.computes = False
        self.pulled: tuple[int, ...] = ()
        """The versions that were received by a pull last; what came before is not used any more."""
        self._worker = worker
        self._options = worker.cluster.options
        self._witness = worker.cluster.witness
        self._invariants = worker.cluster.invariants
        self.places = self._witness.places
        """Those of the generation that the worker has joined."""
        self._versions: dict[tuple[int, int], int] = {}
        """Of what was received last, by shard and place in memory."""
        self._bases: tuple[int, ...] = ()
        self._rows: RowSets
        self._evaluated: dict[str, Array] = {}

    # -- what is computed from -----------------------------------------------------------------

    @property
    def parameters(self) -> NDArray:
        """``[arena length]``: the current ones."""
        return self._current[ARENA]

    @property
    def versions(self) -> tuple[int, ...]:
        """Of each shard, the version of the current parameters."""
        shards = range(self.places.plan.shards)
        parts = [self.places.part(self.parameters, shard) for shard in shards]
        return tuple(self._versions[shard, _place(parts[shard])] for shard in shards)

    def received(self, shard: int, array: NDArray, version: int) -> None:
        """``array`` has a shard's values of ``version`` now."""
        self._versions[shard, _place(array)] = version

    def check_base(self, shard: int, push: PushRequest) -> None:
        """A gradient is of the older one of parameters and rows."""
        if push.base_version != self._bases[shard]:
            self._invariants.fail(
                f"{self._worker.process} pushes {push.attempt} to shard {shard} as of version "
                f"{push.base_version}; it was computed from version {self._bases[shard]}"
            )

    def _check_rows(self, rows: ReceivedRows, parameters: NDArray) -> tuple[int, ...]:
        """The rows' versions, and those of other shards' parameters. None is older than what was
        pulled last; with parameters of the same version they are one moment's."""
        found = []
        for shard in self.places.rows:
            parts = rows.needed.on_shard(shard)
            version = self._versions[shard, _place(rows.values[PAIR][parts[PAIR]])]
            found.append(version)
            if self.pulled and version < self.pulled[shard]:
                self._invariants.fail(
                    f"{self._worker.process} uses rows of version {version} of shard {shard}, "
                    f"after it has pulled version {self.pulled[shard]}"
                )
            partner = self.places.partner(shard)
            part = self.places.part(parameters, partner)
            if version == self._versions[partner, _place(part)]:
                self._check_moment(shard, rows, version, part)
        return (*found, *self._bases[len(found) :])

    def _check_moment(self, shard: int, rows: ReceivedRows, version: int, part: NDArray) -> None:
        parts = rows.needed.on_shard(shard)
        ids = tuple((table, rows.needed.ids[table][at]) for table, at in parts.items())
        came = tuple(rows.values[table][at] for table, at in parts.items())
        self._invariants.tables.check_answer(
            self._worker.process, shard, ids, Values(version, 0, {}, rows=came), part
        )

    # -- as the performer uses it --------------------------------------------------------------

    def rows_nbytes(self, _plan: Plan, /) -> int:
        """See GradientSource, as for all methods here."""
        return ROWS_NBYTES

    def prepare(self, plan: Plan, workspace: Workspace) -> None:
        self._versions.clear()
        self.pulled = ()
        self.places = Places(plan)
        super().prepare(plan, workspace)
        self._rows = RowSets(plan.tables, workspace.row_sets)
        self._evaluated = {ARENA: self._witness.initial()}

    def initial_values(self, _first_rows: str = "", /) -> Mapping[str, Array]:
        return {ARENA: self._witness.initial()}

    def read(self, batch: BatchId) -> BatchId:
        return batch

    def ahead(self, batch: BatchId, /) -> BatchId | None:
        return batch if self._worker.fibers.chance() >= NOT_READ else None

    def place(self, given: BatchId, /) -> ReceivedRows | None:
        if not self._options.tables:
            return None
        return self._rows.place(self._needed(given))

    @property
    def at_once(self) -> int:
        return self._options.devices.get(self._worker.process.name, 1)

    @property
    def sums(self) -> bool:
        return self._options.sums

    @property
    def exact(self) -> bool:
        return self._options.exact

    def gradients(
        self, batches: Sequence[BatchId], _given: Sequence[BatchId], /
    ) -> Sequence[FakeResult]:
        assert len(batches) <= self.at_once
        self._worker.cluster.counts["computed at once"] += 1
        self._compute()
        return [self._result(batch, None) for batch in batches]

    def gradient(self, batch: BatchId, _given: BatchId, rows: ReceivedRows | None, /) -> FakeResult:
        self._compute()
        return self._result(batch, rows)

    def _compute(self) -> None:
        self.computes = True
        self._worker.fibers.sleep(self._options.batch_s)
        self.computes = False

    def _result(self, batch: BatchId, rows: ReceivedRows | None) -> FakeResult:
        parameters = self.parameters
        self._bases = self.versions
        if rows is not None:
            self._bases = tuple(map(min, self._bases, self._check_rows(rows, parameters)))
        places = self.places
        shards = range(places.plan.shards)
        parts = [self._witness.gradient(batch, places.part(parameters, k)) for k in shards]
        gradients = [part for part in parts if part is not None]
        return FakeResult(
            tuple({ARENA: plain(gradient)} for gradient in gradients),
            finite=batch not in self._witness.skipped,
            rows=tuple(
                self._row_gradients(batch, gradients[places.partner(shard)], shard)
                for shard in shards
                if gradients and rows is not None
            ),
            metrics=[float(sum(range(batch.first, batch.first + batch.count)))],
        )

    def swap(self, version: int) -> None:
        super().swap(version)
        versions = self.versions
        assert version == max(versions)
        generation = self._worker.standing.membership.generation
        self._invariants.check_worker(self._worker, generation, versions)

    def evaluate(
        self, task: pb.EvaluateTask, generation: int, pull: PullSnapshot
    ) -> pb.EvaluateDone:
        pull(task.snapshot, self._evaluated)
        parameters = self._evaluated[ARENA]
        self._invariants.check_pull(self._worker, parameters, task.snapshot)
        if self._options.tables:
            rows = RowSets(self._witness.plan.tables).place(self._needed(None))
            pull(task.snapshot, None, rows=rows)
            for shard in self.places.rows:
                part = self.places.part(parameters, self.places.partner(shard))
                self._check_moment(shard, rows, rows.versions[shard], part)
        self._worker.fibers.sleep(self._options.batch_s)
        records = task.stop - task.start
        loss = self._witness.loss(parameters, self.places)
        state = pb.MetricVariable(shape=[2], values=[loss * records, records])
        return pb.EvaluateDone(
            evaluation=task.evaluation,
            task=task.task,
            records=records,
            states=pb.MetricStates(variables=[state]),
        )

    def merge(self, merge: pb.MergeEvaluation) -> pb.MergeDone:
        loss, *metrics = merge.states.variables
        total, records = loss.values
        results = {"loss": total / records}
        if merge.training:
            results |= {"records": records, POSITIONS: metrics[0].values[0]}
        return pb.MergeDone(evaluation=merge.evaluation, results=results)

    # -- rows ----------------------------------------------------------------------------------

    def _needed(self, batch: BatchId | None) -> RowsNeeded:
        """The rows of ``batch``; None: of all records."""
        tables = self._witness.tables
        by_shard = [
            tables.every(shard) if batch is None else tables.wanted(batch, shard)
            for shard in self.places.rows
        ]
        ids = [[of[table][1] for of in by_shard] for table in range(self._options.tables)]
        cuts = [np.cumsum([0, *map(len, parts)]).tolist() for parts in ids]
        needed = RowsNeeded(tuple(map(np.concatenate, ids)), tuple(map(tuple, cuts)))
        return needed.with_slices(self.places.plan.slices)

    def _row_gradients(self, batch: BatchId, gradient: NDArray, shard: int) -> dict[int, Rows]:
        if shard not in self.places.rows:
            return {}
        wanted: TableIds = self._witness.tables.wanted(batch, shard)
        values = self._witness.row_gradients(batch, gradient, shard)
        return {table: Rows(ids, of) for (table, ids), of in zip(wanted, values, strict=True)}


def _place(array: Any) -> int:
    place: int = array.__array_interface__["data"][0]
    return place
