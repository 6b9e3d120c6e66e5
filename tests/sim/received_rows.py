"""The rows of tables that a simulated worker has, as ``worker.performer`` keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pserver.requests import Values
from pserver.table_ids import TableIds
from psrpc.batch import BatchId
from tests.sim.schedule import Process
from tests.sim.witness import NDArray

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster


class ReceivedRows:
    """Rows of at most one batch that is still to be computed; each is looked at as it comes."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self._cluster = cluster
        self._process = process
        self._kept: tuple[BatchId, tuple[int, ...]] | None = None
        """The batch, and the version of each shard's rows."""

    @property
    def none(self) -> bool:
        """Whether there are no rows of a batch to come."""
        return self._kept is None

    def wanted(self, batch: BatchId | None) -> list[TableIds]:
        """Of each shard, the ids of ``batch``."""
        shards = range(self._cluster.options.shards)
        if batch is None or not self._cluster.options.tables:
            return [() for _ in shards]
        return [self._cluster.witness.tables.wanted(batch, shard) for shard in shards]

    def every(self) -> list[TableIds]:
        """Of each shard, all ids that there are."""
        shards = range(self._cluster.options.shards)
        if not self._cluster.options.tables:
            return [() for _ in shards]
        return [self._cluster.witness.tables.every(shard) for shard in shards]

    def receive(
        self,
        batch: BatchId,
        answers: Sequence[Values],
        parameters: NDArray,
        versions: Sequence[int],
    ) -> None:
        """Rows of ``batch`` have come; those of ``versions`` are compared with ``parameters``."""
        self._kept = batch, tuple(values.version for values in answers)
        for shard, wanted in enumerate(self.wanted(batch)):
            if answers[shard].version == versions[shard]:
                self.check(shard, wanted, answers[shard], parameters)

    def check(self, shard: int, wanted: TableIds, values: Values, parameters: NDArray) -> None:
        """Rows of a shard are of one version with its part of ``parameters``."""
        part = self._cluster.witness.shard_part(parameters, shard)
        tables = self._cluster.invariants.tables
        tables.check_answer(self._process, shard, wanted, values, part)

    def has(self, batch: BatchId) -> bool:
        """Whether the rows of ``batch`` are there."""
        return self._kept is not None and self._kept[0] == batch

    def take(self) -> tuple[int, ...]:
        """The rows are used: their versions."""
        assert self._kept is not None
        _, versions = self._kept
        self._kept = None
        return versions

    def drop(self) -> None:
        """They are of no use any more."""
        self._kept = None
