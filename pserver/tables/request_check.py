"""Checks of the ids and gradients of a request."""

from __future__ import annotations

import numpy as np

from psrpc.core.errors import InvalidArgument
from psrpc.core.tables import Ids, Rows, TableSpec, shard_of

_BLOCK = 1 << 17
"""Elements checked at a time, so that intermediate arrays stay in the cache."""


def check_ids(spec: TableSpec, shard: int, shards: int, ids: Ids) -> None:
    """Checks that ``ids`` are int64 ``[n]``, strictly ascending, of this shard and the vocabulary.

    Raises:
        InvalidArgument: names the table, the id and the expected values.
    """
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise InvalidArgument(
            f"table {spec.name!r} got ids {ids.dtype}{list(ids.shape)}; expected int64[n]"
        )
    if not len(ids):
        return
    falling = ids[1:] <= ids[:-1]
    if falling.any():
        at = int(falling.argmax())
        raise InvalidArgument(
            f"table {spec.name!r}: id {ids[at + 1]} follows id {ids[at]}; ids have to ascend, each "
            "once"
        )
    if spec.vocabulary is not None and not (ids[0] >= 0 and ids[-1] < spec.vocabulary):
        wrong = ids[0] if ids[0] < 0 else ids[ids.searchsorted(spec.vocabulary)]
        raise InvalidArgument(
            f"table {spec.name!r}: id {wrong} is outside the vocabulary, 0 to {spec.vocabulary - 1}"
        )
    if shards > 1:
        owners = shard_of(ids, shards)
        foreign = owners != shard
        if foreign.any():
            at = int(foreign.argmax())
            raise InvalidArgument(
                f"table {spec.name!r}: id {ids[at]} is of shard {owners[at]}; this is shard {shard}"
            )


def check_gradients(spec: TableSpec, rows: Rows) -> None:
    """Checks that the gradients are float32 ``[n, width]`` and finite.

    Raises:
        InvalidArgument: names the table and the id of a value that is not finite.
    """
    values = rows.values
    if values.dtype != np.float32 or values.shape != (len(rows.ids), spec.width):
        raise InvalidArgument(
            f"table {spec.name!r} got gradients {values.dtype}{list(values.shape)}; expected "
            f"float32[{len(rows.ids)}, {spec.width}]"
        )
    if rows.finite:
        return
    step = max(1, _BLOCK // spec.width)
    for start in range(0, len(values), step):
        finite = np.isfinite(values[start : start + step])
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            raise InvalidArgument(
                f"table {spec.name!r}: the gradient of id {rows.ids[start + row]} is "
                f"{values[start + row, column]} in column {column}; nothing was applied"
            )
