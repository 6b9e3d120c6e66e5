"""Checks the header of a push, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from pserver.core.assembly import GRADIENTS, check_extents
from pserver.core.requests import PushRequest
from pserver.core.table_ids import check_row_extents
from psrpc.core.batch import LOSS, MAX_VALUES, BatchId
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from psrpc.core.policy import Policy
from psrpc.core.text import counted

MAX_SUMMED = 63
"""How many batches a sum may have besides its first."""


def check_push(request: PushRequest, plan: Plan, shard: int, version: int) -> None:
    """Refuses a push that cannot be applied to ``shard`` at ``version``, before anything is
    allocated.

    Raises:
        InvalidArgument: wrong counts, a base version from the future, or extents that do not match
            the plan.
    """
    if request.examples != request.batch.count:
        raise InvalidArgument(
            f"a push of {request.batch} says it has {request.examples} examples;"
            f" expected {request.batch.count}"
        )
    if request.base_version > version:
        raise InvalidArgument(
            f"a push of {request.batch} has base version {request.base_version};"
            f" shard {shard} is at {version}"
        )
    for part in request.parts:
        check_totals(part.attempt.batch, part.totals)
    if request.skipped:
        if request.extents or request.rows:
            # The extents of rows, if any, come last.
            arenas = max(0, len(request.extents) - len(request.rows))
            raise InvalidArgument(
                f"a skipped push of {request.batch} announces {counted(arenas, 'arena')} and rows"
                f" of {counted(len(request.rows), 'table')}; expected neither"
            )
        if request.totals:
            raise InvalidArgument(f"a skipped push of {request.batch} has totals; expected none")
        return
    extents = request.extents
    if request.rows:
        cut = max(0, len(extents) - len(request.rows))
        check_row_extents(plan, extents[cut:], request.rows)
        extents = extents[:cut]
    check_extents(plan, shard, extents, GRADIENTS)


def check_totals(batch: BatchId, totals: Sequence[float]) -> None:
    """Raises InvalidArgument unless ``totals`` are none, or those of a batch."""
    if totals and not (LOSS <= len(totals) <= MAX_VALUES and all(map(math.isfinite, totals))):
        raise InvalidArgument(
            f"a push of {batch} has {len(totals)} totals; expected none, or"
            f" {LOSS} to {MAX_VALUES} finite numbers"
        )


def check_sum(request: PushRequest, policy: Policy) -> None:
    """Raises InvalidArgument if ``request`` must not be a sum, or has a batch twice."""
    rounds = policy.rounds and not policy.backups
    if request.skipped or not (rounds or (policy.mode == "async" and not request.rows)):
        raise InvalidArgument(
            f"a push of {request.batch} is of {len(request.parts)} batches; expected one, except "
            "of finite gradients in sync mode without backup workers, or in async mode without rows"
        )
    if len(request.summed) > MAX_SUMMED:
        raise InvalidArgument(
            f"a push of {request.batch} sums {len(request.parts)} batches; expected at most "
            f"{MAX_SUMMED + 1}"
        )
    known = sorted((b.epoch, b.first, b.first + b.count) for b in request.batches)
    for (epoch, _, stop), (after, start, _) in pairwise(known):
        if epoch == after and start < stop:
            raise InvalidArgument(f"a push of {request.batch} sums a record twice")
