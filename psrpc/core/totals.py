"""Totals of an epoch's training: sums over batches that make up its loss and its metrics.

A row of numbers: the loss times the records, the records, and then the variables of the job's
metrics, flat. Each batch adds its own, and counts when its gradient does.
"""

from __future__ import annotations

from collections.abc import Sequence

LOSS = 2
"""Numbers that the mean loss is made of; they come first. Load-bearing."""

MAX_VALUES = 1024
"""Numbers of a row. What has more metrics than that has totals of its loss alone."""

KEPT_VALUES = 1 << 14
"""Numbers that a shard keeps, of all epochs together: the coordinator has the older ones."""


def add_totals(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    """The sum of two rows; of the loss alone where their metrics are not the same, since a job was
    resumed with others."""
    if len(one) != len(other):
        one, other = one[:LOSS], other[:LOSS]
    return tuple([mine + its for mine, its in zip(one, other, strict=True)])
