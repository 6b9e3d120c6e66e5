"""The Keras variables that a shard makes of its arenas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import keras

from pserver.updates.keras_objects import rebuild
from psrpc.core.plan import ArenaPlan, Plan


@dataclass(frozen=True)
class Piece:
    """What becomes one Keras variable: elements ``[offset, offset + size)`` of a shard's arena."""

    arena: str
    offset: int
    name: str
    shape: tuple[int, ...]
    constraint: Mapping[str, Any] | None

    @property
    def place(self) -> slice:
        """Its elements in the shard's part of the arena."""
        return slice(self.offset, self.offset + prod(self.shape))


def pieces_of(plan: Plan, arena: ArenaPlan, shard: int) -> list[Piece]:
    """The variables that a shard makes of its part of an arena."""
    if plan.placement == "cut":
        return [Piece(arena.name, 0, arena.name, (arena.shard_length(shard),), None)]
    return [
        Piece(arena.name, s.offset, s.variable.name, s.variable.shape, s.variable.constraint)
        for s in plan.shard_slices(arena, shard)
    ]


def make_variable(piece: Piece, value: Any) -> Any:
    """The Keras variable of ``piece`` with this value, a tensor."""
    # Optimizers read a variable's path (Muon's exclude_layers) and name their own after it, in
    # letters that TensorFlow allows; the constructor takes no path.
    variable = keras.Variable(value, dtype=value.dtype.name, name="slice")
    variable._path = re.sub(r"[^\w./-]", "_", piece.name, flags=re.ASCII)
    if piece.constraint is not None:
        variable.constraint = rebuild("constraint", piece.constraint)
    return variable
