"""Compares the batches that shards have recorded as skipped with those that workers reported so.

A worker may skip a batch that was leased to it: its gradient may be NaN. One that skips and reports
a loss as if it had trained erases batches without a trace, which no shard can see alone.

Pure: the clock comes in as an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

PATIENCE_S = 10.0
"""How long shards may have counted more than a worker has reported: a report comes with the
worker's next heartbeat or lease, and a shard's count with its own heartbeat."""


class SkipAudit:
    """The skipped batches of one generation, by worker. Not thread-safe."""

    def __init__(self) -> None:
        self._reported: Counter[str] = Counter()
        self._counted: dict[int, Mapping[str, int]] = {}
        self._since: dict[str, float] = {}
        """When shards were first seen to have counted more."""

    def reported(self, worker: str) -> None:
        """``worker`` has reported a batch as skipped."""
        self._reported[worker] += 1

    def counted(self, shard: int, skips: Mapping[str, int]) -> None:
        """``shard`` has recorded so many batches of each worker as skipped in this generation."""
        self._counted[shard] = skips

    def judge(self, active: Collection[str], now: float) -> list[str]:
        """A warning for each of the ``active`` workers whose shards have counted more skipped
        batches than it has reported, for :data:`PATIENCE_S` by now. One that was lost in between
        could not report."""
        warnings = []
        for worker in active:
            counts = {s: skips[worker] for s, skips in self._counted.items() if worker in skips}
            shard = max(counts, key=counts.__getitem__, default=None)
            reported = self._reported[worker]
            if shard is None or counts[shard] <= reported:
                self._since.pop(worker, None)
            elif now - self._since.setdefault(worker, now) >= PATIENCE_S:
                warnings.append(
                    f"{worker} reports batches as trained that it pushes as skipped: shard {shard} "
                    f"has recorded more of them as skipped than it has reported; "
                    f"`coordinator revoke {worker}` ends its part in the job"
                )
        for gone in self._since.keys() - set(active):
            del self._since[gone]
        return warnings
