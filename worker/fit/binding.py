"""The variables of a caller's Keras model under the names that a job's plan has for them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import keras

from pserver.updates.keras_objects import SlotVariables
from psrpc.core.errors import InvalidJob
from psrpc.core.placement import make_plan
from psrpc.core.plan import AVERAGES, MEAN_SQUARE, Plan
from worker.model.loss_scale import inner
from worker.model.variables import model_variables

Key = tuple[str, str]
"""Names a part of a state: the slot, empty for a variable's value, and the name of the variable,
empty for a scalar of the optimizer."""


class Binding:
    """Binds the parts of a state, as checkpoints of a plan have them, to variables of a model.

    Attributes:
        whole: the plan with all variables on one shard.
        variables: part of the state -> the Keras variable with it.
        forms: dtype and shape of each variable, in the same order.
    """

    def __init__(self, model: keras.Model, plan: Plan) -> None:
        self.optimizer = inner(model.optimizer)
        self.whole = make_plan(plan.variables, 1, plan.placement, plan.tables)
        named = _named(model, plan)
        self.variables: dict[Key, Any] = {
            ("", spec.name): named[spec.name] for spec in plan.variables if spec.size
        }
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        # The variables that the optimizer was built for: a layer may have been frozen since.
        updated = self.optimizer._trainable_variables
        slots = SlotVariables(self.optimizer, updated)
        names = {id(named[v.name]): v.name for v in plan.variables if v.role == "trainable"}
        for lost in names.keys() - {id(variable) for variable in updated}:
            raise InvalidJob(
                f"model.optimizer was built before variable {names[lost]!r} became trainable; "
                "compile the model again"
            )
        self._slots = slots.elements | slots.variables
        for slot, of_variables in self._slots.items():
            for variable, held in zip(updated, of_variables, strict=True):
                if held is not None and id(variable) in names and held.shape.num_elements():
                    self.variables[slot, names[id(variable)]] = held
        self.variables |= {(name, ""): variable for name, variable in slots.scalars.items()}
        self._constants = [
            (variable, average)
            for variable, average in zip(updated, slots.elements.get(AVERAGES, ()), strict=False)
            if average is not None and id(variable) not in names
        ]
        self.forms = {
            key: (keras.backend.standardize_dtype(variable.dtype), tuple(variable.shape))
            for key, variable in self.variables.items()
        }
        self._weights = list(map(id, model.weights))

    def holds(self, model: keras.Model) -> bool:
        """Whether the model still has the same variables and optimizer."""
        same = self.optimizer is inner(model.optimizer)
        return same and self._weights == list(map(id, model.weights))

    def check(self, found: Iterable[Key]) -> None:
        """Checks that a checkpoint has these slots.

        Raises:
            InvalidJob: it was written with another optimizer.
        """
        found = set(found)
        # For a variable without the slot, shards hold zeros.
        known = {MEAN_SQUARE, *self._slots}
        unknown = [key for key in found - self.variables.keys() if key[0] not in known]
        for (slot, name), where in [
            *((key, "only in the checkpoint") for key in sorted(unknown)),
            *((key, "only in the model's") for key in sorted(self.variables.keys() - found)),
        ]:
            of = f" of variable {name!r}" if name else ""
            raise InvalidJob(
                f"the optimizer that the model is compiled with, {type(self.optimizer).__name__}, "
                f"is not that of the job: {slot!r}{of} is {where}; compile the model as it was "
                "when fit was called",
                code="PS405",
            )

    def follow_constants(self) -> None:
        """Sets the averages of variables without a gradient to the variables' own values. Shards
        keep no averages of them, but at the end of ``fit`` Keras assigns averages to all
        variables."""
        if int(self.optimizer._iterations):
            for variable, average in self._constants:
                average.assign(variable)


def _named(model: keras.Model, plan: Plan) -> dict[str, Any]:
    """Returns the model's variables by the plan's names.

    Keras numbers layers and models without a name per process, so those of a subclassed model may
    have other numbers in the workers. Then names match by the order of their numbers.

    Raises:
        InvalidJob: the variables are others; names the first.
    """
    if not model.built or not (model.weights or plan.tables):
        raise InvalidJob(
            f"model {model.name!r} has no variables yet; call it on a batch, or give it an Input"
        )
    mine = {spec.name: (spec, variable) for spec, variable in model_variables(model)}
    theirs = {spec.name: spec for spec in plan.variables}
    names = dict(zip(theirs, theirs, strict=True))
    if mine.keys() != theirs.keys():
        ranked, own = _ranked(theirs), _ranked(mine)
        names = {name: own[rank] for rank, name in ranked.items() if rank in own}
    taken = set(names.values())
    lacking = [
        *((name, "job", "model") for name in theirs if name not in names),
        *((name, "model", "job") for name in mine if name not in taken),
    ]
    for name, one, other in lacking:
        raise InvalidJob(
            f"the {one} has a variable {name!r}, and the {other} has none of that name; give fit "
            "the model that it began with, and leave its layers as they are",
            code="PS405",
        )
    for name, own_name in names.items():
        # Roles may differ: in the job, trainable variables without a gradient are state.
        spec, wanted = mine[own_name][0], theirs[name]
        if (spec.shape, spec.dtype) != (wanted.shape, wanted.dtype):
            raise InvalidJob(
                f"variable {own_name!r} is {spec.dtype}{list(spec.shape)} in the model and "
                f"{wanted.dtype}{list(wanted.shape)} in the job; give fit the model that it began "
                "with, and leave its layers as they are",
                code="PS405",
            )
    return {name: mine[own_name][1] for name, own_name in names.items()}


_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")


def _ranked(names: Iterable[str]) -> dict[tuple[str, int], str]:
    """Returns ``names``, each by its text without numbers and its place, in the order of the
    numbers, among the names with the same text."""
    alike: dict[str, list[tuple[list[int], str]]] = {}
    for name in names:
        parts = [_NUMBERED.fullmatch(part) for part in name.split("/")]
        plain = "/".join(part[1] for part in parts if part)
        numbers = [int(part[2] or 0) for part in parts if part]
        alike.setdefault(plain, []).append((numbers, name))
    return {
        (plain, rank): name
        for plain, members in alike.items()
        for rank, (_, name) in enumerate(sorted(members))
    }
