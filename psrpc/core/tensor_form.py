"""The form of a plan in JSON, and what its numbers have in common. Pure.

Nothing is made in proportion to a number of a plan before :func:`check_plan` has passed it.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any

from psrpc.core.document import anything, choice, listed, mapped, maybe, record, text, whole

MAX_SHARDS = 1 << 16

MAX_ELEMENTS = 1 << 48
"""Of a variable, by its shape: a thousand times what the largest disks hold."""

_EXTENTS = listed(whole(0, MAX_ELEMENTS), most=32)


def shape(value: Any, where: str) -> list[int]:
    """Passes a shape that an array may have."""
    found: list[int] = _EXTENTS(value, where)
    if prod(extent or 1 for extent in found) > MAX_ELEMENTS:
        raise ValueError(f"{where} is {found}; expected {MAX_ELEMENTS} elements at most")
    return found


_KIND = {"name": text, "dtype": text, "role": choice("trainable", "state")}
_PLACES = listed(whole())

variable = record(_KIND | {"shape": shape}, {"constraint": maybe(mapped(anything))})
"""Passes a variable of a plan."""

_CHECK = record(
    {
        "format": whole(1, 1),
        "shards": whole(1, MAX_SHARDS),
        "placement": choice("cut", "whole"),
        "variables": listed(variable),
        "arenas": listed(record(_KIND | dict.fromkeys(("order", "starts", "cuts"), _PLACES))),
    },
    {"tables": listed(anything)},
)


def check_plan(document: Any) -> None:
    """Passes the JSON of a plan in which every variable lies whole in one arena of its kind, and
    the shards together have each arena once. Tables are not looked at.

    Raises:
        ValueError: names the field, or the arena.
    """
    _CHECK(document, "")
    variables, arenas = document["variables"], document["arenas"]
    if sorted(i for arena in arenas for i in arena["order"]) != list(range(len(variables))):
        raise ValueError(f"its arenas do not have each of its {len(variables)} variables once")
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
