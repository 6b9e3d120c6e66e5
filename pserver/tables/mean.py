"""The weighted sum of gradients of rows: what a round of sync training applies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psrpc.core.tables import Rows


def weighted_sum(parts: Sequence[tuple[np.float32, Rows]]) -> Rows:
    """Σ w_k g_k of each id, in the order given; a part that lacks an id adds nothing to it.

    Args:
        parts: weights, and rows of one table with their gradients; at least one.

    Returns:
        The ids of all parts, each once and ascending, and the sums, in arrays of their own.
    """
    weight, first = parts[0]
    if all(np.array_equal(first.ids, rows.ids) for _, rows in parts[1:]):
        total = first.values * weight
        for weight, rows in parts[1:]:
            total += rows.values * weight
        return Rows(first.ids.copy(), total)
    ids = np.unique(np.concatenate([rows.ids for _, rows in parts]))
    total = np.zeros((len(ids), first.values.shape[1]), np.float32)
    for weight, rows in parts:
        at = ids.searchsorted(rows.ids)
        total[at] += rows.values * weight
    return Rows(ids, total)
