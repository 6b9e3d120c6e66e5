"""Which of a Keras optimizer's variables is which slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from pserver.updates.keras_function import DEVICE
from pserver.updates.keras_objects import make_variable, pieces_of, rebuild
from psrpc.core.plan import Plan

_OWN_SHAPE = {("Adafactor", "r"), ("Adafactor", "c")}
"""Slots whose shape is not the variable's: a row and a column statistic of each matrix."""

_NOT_SLOTS = {"_variables", "_trainable_variables"}

_FROM_CONFIG = {"learning_rate"}
"""Scalars that the job decides anew on resume, so that an override takes effect."""


class SlotVariables:
    """The state of a built optimizer, by the names of the attributes that Keras keeps it in.

    Keras's variable names do not tell Adafactor's rows from its columns; the attributes do, and
    they are the same for every placement. A leading underscore is dropped. The names are in
    checkpoints: load-bearing.

    Attributes:
        elements: slot name -> one variable per model variable, of its shape, or None.
        variables: slot name -> one variable per model variable, of a shape of its own, or None.
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
                    # Variables without rows have an integer in their place, which nobody reads.
                    self.variables[name] = [
                        s if len(v.shape) >= 2 else None
                        for s, v in zip(value, variables, strict=True)
                    ]
                else:
                    self.elements[name] = list(value)
        for v in optimizer.variables:
            assert id(v) in accounted, f"{v.path} of {type(optimizer).__name__} is in no attribute"


def slot_names(optimizer: Mapping[str, Any], plan: Plan) -> list[str]:
    """What the state of ``optimizer`` consists of for the variables of ``plan``, slots and scalars,
    by the names that they have in checkpoints. ``plan`` is for one shard; no memory is taken for
    any of it.

    Raises:
        InvalidJob: shards will not build the optimizer.
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
