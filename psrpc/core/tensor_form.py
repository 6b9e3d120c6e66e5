"""Checks the form of a plan in JSON and the consistency of its numbers. Pure.

Code must call :func:`check_plan` before it allocates memory in proportion to a number in a plan.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any

from psrpc.core.document import anything, choice, listed, mapped, maybe, record, text, whole

MAX_SHARDS = 1 << 16
MAX_ELEMENTS = 1 << 48
"""Maximum number of elements of a variable: a thousand times as many as the largest disks can
store."""

_EXTENTS = listed(whole(0, MAX_ELEMENTS), most=32)


def shape(value: Any, where: str) -> list[int]:
    """Checks for the shape of an array."""
    found: list[int] = _EXTENTS(value, where)
    if prod(extent or 1 for extent in found) > MAX_ELEMENTS:
        raise ValueError(f"{where} is {found}; expected {MAX_ELEMENTS} elements at most")
    return found


_KIND = {"name": text, "dtype": text, "role": choice("trainable", "state")}
_PLACES = listed(whole())

variable = record(_KIND | {"shape": shape}, {"constraint": maybe(mapped(anything))})
"""Checks for a variable of a plan."""

_CHECK = record(
    {
        "format": whole(1, 1),
        "shards": whole(1, MAX_SHARDS),
        "placement": choice("cut", "whole"),
        "variables": listed(variable),
        "arenas": listed(record(_KIND | dict.fromkeys(("order", "starts", "cuts"), _PLACES))),
    },
    {"tables": listed(anything), "slices": whole(0, MAX_SHARDS)},
)


def check_plan(document: Any) -> None:
    """Checks that every whole variable lies in one arena of its dtype and role, and that the shards
    together cover each arena exactly once, the last ones alone if they are slices. Does not check
    tables.

    Raises:
        ValueError: names the field, or the arena.
    """
    _CHECK(document, "")
    variables, arenas = document["variables"], document["arenas"]
    if sorted(i for arena in arenas for i in arena["order"]) != list(range(len(variables))):
        raise ValueError(f"its arenas do not have each of its {len(variables)} variables once")
    rows_only = document["shards"] - document.get("slices", 0)
    if rows_only < 1:
        raise ValueError(f"of its {document['shards']} shards {document['slices']} are slices")
    if len({arena["name"] for arena in arenas}) != len(arenas):
        raise ValueError("two of its arenas have one name")
    for arena in arenas:
        members = [variables[index] for index in arena["order"]]
        what = f"arena {arena['name']!r}"
        if any(v[kind] != arena[kind] for v in members for kind in ("dtype", "role")):
            raise ValueError(f"{what} has variables of another dtype or role")
        *starts, length = accumulate((prod(v["shape"]) for v in members), initial=0)
        if arena["starts"] != starts:
            raise ValueError(f"the variables of {what} do not lie end to end")
        cuts, shards = arena["cuts"], document["shards"]
        if len(cuts) != shards + 1 or cuts != [0, *sorted(cuts)[1:-1], length]:
            raise ValueError(f"{what} of {length} elements is not cut over {shards} shards")
        if rows_only < shards and cuts[rows_only]:
            raise ValueError(f"{what} has elements on shards that have rows only")
