"""What policies did that nobody asked for by name: gradients refused, computed twice, or late."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Counts of one run since its coordinator started. They only rise.

    Attributes:
        speculative: second attempts of micro-batches that another worker was slow with.
        superseded: attempts that were committed after another one of their micro-batch, or never
            will be because another one was.
        late: micro-batches that counted in a later round than the one they were leased in.
        overdue: rounds that lasted longer than ``round_deadline_s``.
        too_stale: gradients that a shard refused because their parameters were too old.
    """

    speculative: int = 0
    superseded: int = 0
    late: int = 0
    overdue: int = 0
    too_stale: int = 0
