"""Decides which shard holds which part of each variable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from psrpc.core.errors import InvalidJob
from psrpc.core.plan import (
    ALIGNMENT_BYTES,
    DTYPES,
    ArenaPlan,
    Placement,
    Plan,
    Role,
    VariableSpec,
    check_table_specs,
    check_variables,
)
from psrpc.core.tables import TableSpec


def make_plan(
    variables: Iterable[VariableSpec],
    shards: int,
    placement: Placement,
    tables: Iterable[TableSpec] = (),
    slices: int = 0,
) -> Plan:
    """Lays ``variables`` and ``tables`` out over ``shards``. With ``slices``, the last so many of
    the shards have all variables, and the others all rows of tables.

    ``cut`` divides every arena evenly, so that no shard is a hot spot; a variable may span shards.
    Variables whose size is a multiple of 64 bytes come first, then the others, each group in the
    given order. So the variables of the first group are aligned, and TensorFlow need not copy them
    out of the arena. ``whole`` keeps each variable on one shard: it assigns variables in order of
    size, the largest first, each to the shard with the fewest bytes so far.

    Raises:
        InvalidJob: there is nothing to train, a dtype is unknown, variables or tables have the same
            name, or a table has impossible settings.
    """
    variables, tables = tuple(variables), tuple(tables)
    if shards < 1:
        raise InvalidJob(f"shards is {shards}; expected at least 1")
    if not 0 <= slices < shards:
        raise InvalidJob(f"slices is {slices}; expected fewer than the {shards} shards")
    check_table_specs(tables)
    if not tables and not any(v.role == "trainable" for v in variables):
        raise InvalidJob("the model has no trainable variables; there is nothing to train")
    check_variables(variables)
    roles: tuple[Role, ...] = ("trainable", "state")
    arenas = []
    over = slices or shards
    load = [0] * over
    for dtype in DTYPES:
        for role in roles:
            members = [i for i, v in enumerate(variables) if (v.dtype, v.role) == (dtype, role)]
            if members:
                if placement == "cut":
                    order, cuts = _cut_evenly(variables, members, over)
                else:
                    order, cuts = _keep_whole(variables, members, load)
                sizes = [variables[i].size for i in order]
                starts = np.cumsum([0, *sizes]).tolist()[:-1]
                name = f"{dtype}.{role}"
                cuts = [0] * (shards - over) + cuts
                arenas.append(
                    ArenaPlan(name, dtype, role, tuple(order), tuple(starts), tuple(cuts))
                )
    return Plan(variables, tuple(arenas), shards, placement, tables, slices)


def _cut_evenly(
    variables: Sequence[VariableSpec], members: list[int], shards: int
) -> tuple[list[int], list[int]]:
    length = sum(variables[i].size for i in members)
    step = ALIGNMENT_BYTES // np.dtype(variables[members[0]].dtype).itemsize
    cuts = [min(length, round(length * k / shards / step) * step) for k in range(shards)]
    # sorted() is stable, so each group keeps the given order.
    order = sorted(members, key=lambda i: variables[i].size % step != 0)
    return order, [*cuts, length]


def _keep_whole(
    variables: Sequence[VariableSpec], members: list[int], load: list[int]
) -> tuple[list[int], list[int]]:
    """Returns order and cuts for whole variables; adds their bytes to ``load``, the bytes on each
    shard."""
    shards = len(load)
    per_shard: list[list[int]] = [[] for _ in range(shards)]
    for i in sorted(members, key=lambda i: (-variables[i].size, i)):
        shard = min(range(shards), key=lambda k: (load[k], k))
        per_shard[shard].append(i)
        load[shard] += variables[i].size * np.dtype(variables[i].dtype).itemsize
    cuts = np.cumsum([0, *(sum(variables[i].size for i in part) for part in per_shard)]).tolist()
    return [i for part in per_shard for i in sorted(part)], cuts
