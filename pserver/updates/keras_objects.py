"""Builds Keras objects from serialized documents, of classes on the allow-list only.

Keras's own deserializers make objects of any registered or importable class. This code base never
calls them, which a test over the syntax trees checks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import keras

from pserver.updates.allowlist import (
    check_constraint,
    check_initializer,
    check_optimizer,
    check_schedule,
)
from psrpc.core.errors import InvalidJob
from psrpc.core.plan import ArenaPlan, Plan

Kind = Literal["optimizer", "schedule", "constraint", "initializer"]

_KINDS: Mapping[Kind, tuple[Any, Callable[[Mapping[str, Any]], None]]] = {
    "optimizer": (keras.optimizers, check_optimizer),
    "schedule": (keras.optimizers.schedules, check_schedule),
    "constraint": (keras.constraints, check_constraint),
    "initializer": (keras.initializers, check_initializer),
}


def rebuild(kind: Kind, document: Mapping[str, Any]) -> Any:
    """Builds the object of ``document``, which Keras's ``serialize`` of that kind wrote.

    Raises:
        InvalidJob: its class is not on the allow-list, its arguments are not plain, or Keras
            refuses them.
    """
    classes, check = _KINDS[kind]
    check(document)
    name, config = document["class_name"], dict(document["config"])
    if kind == "optimizer" and isinstance(config.get("learning_rate"), Mapping):
        config["learning_rate"] = rebuild("schedule", config["learning_rate"])
    try:
        return getattr(classes, name)(**config)
    except (TypeError, ValueError) as error:
        raise InvalidJob(f"Keras refuses the arguments of {kind} {name}: {error}") from error


@dataclass(frozen=True)
class VariablePiece:
    """Elements ``[offset, offset + size)`` of a shard's arena that form one Keras variable."""

    arena: str
    offset: int
    name: str
    shape: tuple[int, ...]
    constraint: Mapping[str, Any] | None

    @property
    def place(self) -> slice:
        """Its elements in the shard's part of the arena."""
        return slice(self.offset, self.offset + prod(self.shape))


def pieces_of(plan: Plan, arena: ArenaPlan, shard: int) -> list[VariablePiece]:
    """Returns the pieces of a shard's part of an arena."""
    if plan.placement == "cut":
        return [VariablePiece(arena.name, 0, arena.name, (arena.shard_length(shard),), None)]
    return [
        VariablePiece(
            arena.name, s.offset, s.variable.name, s.variable.shape, s.variable.constraint
        )
        for s in plan.shard_slices(arena, shard)
    ]


def make_variable(piece: VariablePiece, value: Any) -> Any:
    """Makes the Keras variable of ``piece`` with this value, a tensor."""
    # Optimizers read a variable's path (Muon's exclude_layers) and derive names of their own from
    # it, which TensorFlow limits to certain characters; the constructor takes no path.
    variable = keras.Variable(value, dtype=value.dtype.name, name="slice")
    variable._path = re.sub(r"[^\w./-]", "_", piece.name, flags=re.ASCII)
    if piece.constraint is not None:
        variable.constraint = rebuild("constraint", piece.constraint)
    return variable
