"""What can be said of a push by its header alone."""

from __future__ import annotations

import math

from pserver.core.assembly import GRADIENTS, check_extents
from pserver.core.requests import PushRequest
from pserver.core.table_ids import check_row_extents
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from psrpc.core.totals import LOSS, MAX_VALUES


def check_push(request: PushRequest, plan: Plan, shard: int, version: int) -> None:
    """Refuses what cannot be applied to ``shard`` at ``version``, before anything is allocated.

    Raises:
        InvalidArgument: wrong counts, a base version from the future, or extents that are not
            the plan's.
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
    if request.totals and not (
        LOSS <= len(request.totals) <= MAX_VALUES and all(map(math.isfinite, request.totals))
    ):
        raise InvalidArgument(
            f"a push of {request.batch} has {len(request.totals)} totals; expected none, or"
            f" {LOSS} to {MAX_VALUES} finite numbers"
        )
    if request.skipped:
        if request.extents or request.rows:
            raise InvalidArgument(
                f"a skipped push of {request.batch} announces {len(request.extents)} arenas;"
                " expected none"
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
