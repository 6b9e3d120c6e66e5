"""Maps the variables of a Keras optimizer to slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from pserver.updates.keras_function import DEVICE
from pserver.updates.keras_objects import make_variable, pieces_of, rebuild
from psrpc.core.plan import Plan

_OWN_SHAPE = {("Adafactor", "r"), ("Adafactor", "c")}
"""Slots of another shape than the variable's: row and column statistics of each matrix."""

_NOT_SLOTS = {"_variables", "_trainable_variables"}

_FROM_CONFIG = {"learning_rate"}
"""Scalars that the job sets again on resume, so that an override takes effect."""


class SlotVariables:
    """The state of a built optimizer, by attribute name without leading underscore.

    Keras's variable names do not distinguish Adafactor's rows from its columns; the attributes do,
    and they are the same for every placement. Checkpoints contain the names: load-bearing.

    Attributes:
        elements: slot name -> one variable per model variable, of its shape, or None.
        variables: slot name -> one variable per model variable, of its own shape, or None.
        scalars: name -> variable.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self.elements: dict[str, list[Any]] = {}
        self.variables: dict[str, list[Any]] = {}
        self.scalars: dict[str, Any] = {}
        accounted = set()
        keras_variable = type(optimizer._iterations)
        for attribute, value in vars(optimizer).items():
            name = attribute.lstrip("_")
            if isinstance(value, keras_variable):
                accounted.add(id(value))
                if name not in _FROM_CONFIG and (variables or attribute == "_iterations"):
                    self.scalars[name] = value
            elif (
                isinstance(value, list)
                and attribute not in _NOT_SLOTS
                and any(isinstance(v, keras_variable) for v in value)
            ):
                assert len(value) == len(variables), f"{attribute} has {len(value)} variables"
                accounted |= {id(v) for v in value}
                if (type(optimizer).__name__, name) in _OWN_SHAPE:
                    # Keras puts an unused integer for variables without rows.
                    self.variables[name] = [
                        s if len(v.shape) >= 2 else None
                        for s, v in zip(value, variables, strict=True)
                    ]
                else:
                    self.elements[name] = list(value)
        for v in optimizer.variables:
            assert id(v) in accounted, f"{v.path} of {type(optimizer).__name__} is in no attribute"


def keras_slot_names(optimizer: Mapping[str, Any], plan: Plan) -> list[str]:
    """Returns the names of the slots and scalars of ``optimizer`` in checkpoints, for the variables
    of ``plan``, a plan of one shard. Allocates no memory for the state itself.

    Raises:
        InvalidJob: shards refuse the optimizer.
    """
    with tf.device(DEVICE):
        variables = [
            make_variable(piece, tf.zeros([1] * len(piece.shape), arena.dtype))
            for arena in plan.arenas
            if arena.role == "trainable"
            for piece in pieces_of(plan, arena, 0)
        ]
        made = rebuild("optimizer", optimizer)
        made.build(variables)
        own = SlotVariables(made, variables)
    return sorted([*own.elements, *own.variables, *own.scalars])
