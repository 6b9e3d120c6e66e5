"""This process's copy of the job's model, with the shards' variable names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from psrpc.core.errors import InvalidArgument, JobMismatch
from psrpc.core.plan import Plan, VariableSpec, aligned_empty
from worker.data.source import Array, Batch
from worker.embedding.id_finder import IdFinder
from worker.job.job import Job
from worker.job.loader import user_code
from worker.model.build import build_loss
from worker.model.compiled import complete
from worker.model.loss_scale import loss_scale
from worker.model.placement import place_layers
from worker.model.training_metrics import TrainingMetrics
from worker.model.variables import derive, model_variables, seed_variables
from worker.step.keras_step import KerasStep
from worker.step.module_step import ModuleStep

EXAMPLES = 2
"""Records that a model is built with, since shapes of a single record are ambiguous."""

SHOWN = 6
"""Most names that a message lists."""


class Replica:
    """A built model with variables in plan order. Not thread-safe."""

    def __init__(self, job: Job, devices: Sequence[str] = ()) -> None:
        """Builds the model with the job's initial values, spread over ``devices`` if there are any
        and the job says how. Raises InvalidJob if that fails."""
        with user_code("train"):
            count = min(EXAMPLES, job.train.num_records)
            self.example: Batch = job.train.read_range(0, count)
        self.model: Any
        self.job, self.model = complete(job, self.example)
        if job.devices is not None and devices:
            place_layers(self.model, job.devices, devices)

    def variables(self, plan: Plan) -> list[Any]:
        """Returns the model's variables in plan order. Raises JobMismatch if the plan, made from
        the coordinator's copy of the job, has other variables."""
        # The plan lists trainable variables without gradient as state.
        state = {variable.name for variable in plan.variables if variable.role == "state"}
        named = model_variables(self.model, without_gradient=state)
        mine = [spec for spec, _ in named]
        if tuple(mine) != plan.variables:
            raise JobMismatch(
                f"this worker's model differs from the coordinator's: {_difference(mine, plan)}; "
                "use the same job file, data and software everywhere, and a model function that "
                "makes the same model each time",
                code="PS133",
            )
        return [variable for _, variable in named]

    def make_step(self, plan: Plan, *, counts: bool = False) -> KerasStep | ModuleStep:
        """Makes the training step as a function of variable values in plan order. With ``counts``
        the step also computes the job's metrics with each gradient."""
        named = list(zip(plan.variables, self.variables(plan), strict=True))
        scale = loss_scale(self.job.optimizer, self.model)
        return build_step(self.job, self.model, named, counts=counts, scale=scale)

    def make_finder(self, plan: Plan, *, training: bool = True) -> IdFinder | None:
        """Makes the finder of a batch's ids for the plan's tables; None without tables."""
        if not plan.tables:
            return None
        return IdFinder(self.make_step(plan), plan, training=training)

    def num_seeds(self) -> int:
        """Returns the number of the model's seed generators."""
        return len(seed_variables(self.model))

    def values(self, plan: Plan) -> dict[str, Array]:
        """Copies the model's current values: arena name -> ``[length]``, aligned."""
        variables = self.variables(plan)
        arenas = {}
        for arena in plan.arenas:
            flat = aligned_empty(arena.length, arena.dtype)
            for index, start in zip(arena.order, arena.starts, strict=True):
                size = plan.variables[index].size
                flat[start : start + size] = np.ravel(variables[index].numpy())
            arenas[arena.name] = flat
        return arenas

    def assign(self, values: Mapping[str, Array], but: Collection[Any] = ()) -> None:
        """Assigns ``values`` by name to the model's variables, except ``but``. Raises
        InvalidArgument, before any change, if a value is missing or has another shape."""
        named = model_variables(self.model, but=but)
        for spec, _ in named:
            value = values.get(spec.name)
            if value is None:
                raise InvalidArgument(
                    f"there is no value for variable {spec.name!r}; it holds "
                    f"{in_list(sorted(values))}"
                )
            if tuple(value.shape) != spec.shape:
                raise InvalidArgument(
                    f"variable {spec.name!r} has shape {tuple(value.shape)} there; "
                    f"the model's has {spec.shape}"
                )
        for spec, variable in named:
            dtype = keras.backend.standardize_dtype(variable.dtype)
            variable.assign(values[spec.name].astype(dtype, copy=False))
        if isinstance(self.model, keras.Model):
            derive(self.model)


def build_step(
    job: Job,
    model: Any,
    named: Sequence[tuple[VariableSpec, Any]],
    *,
    counts: bool,
    scale: float | None = None,
) -> KerasStep | ModuleStep:
    """Makes the training step of a complete job, as a function of the values of the variables
    ``named``; for ``counts`` see :meth:`Replica.make_step`, for ``scale`` ``KerasStep``."""
    variables = [variable for _, variable in named]
    trainable = [spec.role == "trainable" for spec, _ in named]
    if isinstance(model, keras.Model):
        metrics = TrainingMetrics(job, model) if counts else None
        seeds = seed_variables(model)
        return KerasStep(model, build_loss(job, model), variables, trainable, seeds, metrics, scale)
    assert callable(job.loss)  # build_model refuses others
    return ModuleStep(model, job.loss, variables, trainable)


def _difference(mine: Sequence[VariableSpec], plan: Plan) -> str:
    """Describes the first difference between the model and the plan."""
    theirs = {variable.name: variable for variable in plan.variables}
    for spec in mine:
        other = theirs.pop(spec.name, None)
        if other is None:
            return f"variable {spec.name!r} is only here"
        if spec != other:
            return f"variable {spec.name!r} is {_shown(spec)} here and {_shown(other)} there"
    if theirs:
        return f"variable {next(iter(theirs))!r} is only there"
    return "its variables are in another order"


def _shown(spec: VariableSpec) -> str:
    constraint = ", constrained" if spec.constraint else ""
    return f"{spec.dtype} {list(spec.shape)} ({spec.role}{constraint})"


def in_list(names: Sequence[str]) -> str:
    """Lists the first few names, and the number of the others."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
