"""Adds up gradients that were computed at once, for one push."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from psrpc.core.encoding import Encoded, Gradient, round_to
from psrpc.core.plan import Plan


def sum_gradients(plan: Plan, gradients: Sequence[Gradient]) -> Gradient | None:
    """Returns the sum of gradients of one shard, in new memory: of replaced arenas the last value,
    as if they had been pushed one after the other. None if an element of the sum is infinite.

    Args:
        gradients: finite, at least one, cut alike, ``plain``, ``bfloat16`` or ``float16``.
    """
    total = {}
    for arena in plan.arenas:
        same = [gradient[arena.name] for gradient in gradients]
        added = same[-1] if arena.replaced else _sum(same)
        if added is None:
            return None
        total[arena.name] = added
    return total


def _sum(same: Sequence[Encoded]) -> Encoded | None:
    encoding = same[0].encoding
    parts = []
    for pieces in zip(*[each.parts for each in same], strict=True):
        dtype = pieces[0].dtype if encoding == "plain" else np.float32
        # An infinite element is an answer here, not a surprise.
        with np.errstate(over="ignore"):
            part = reduce(np.add, [piece.astype(dtype, copy=False) for piece in pieces])
        if not np.isfinite(part).all():
            return None
        parts.append(part if encoding == "plain" else round_to(part, encoding))
    return Encoded(encoding, tuple(parts))
