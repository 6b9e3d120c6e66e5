"""This process's copy of the job's model, under the names that the shards know."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
from worker.model.training_metrics import TrainingMetrics
from worker.model.variables import derive, model_variables, seed_variables
from worker.step.keras_step import KerasStep
from worker.step.module_step import ModuleStep

EXAMPLES = 2
"""Records that a model is shown when it is built; shapes of one are taken for something else."""


class Replica:
    """A built model whose variables are laid out as the plan says. Not thread-safe."""

    def __init__(self, job: Job) -> None:
        """Builds the model with the job's initial values.

        Raises:
            InvalidJob: the model cannot be built.
        """
        with user_code("train"):
            count = min(EXAMPLES, job.train.num_records)
            self.example: Batch = job.train.read_range(0, count)
        self.model: Any
        self.job, self.model = complete(job, self.example)

    def variables(self, plan: Plan) -> list[Any]:
        """The model's variables in the order of the plan.

        Raises:
            JobMismatch: the model has other variables than the plan, which was made from the
                coordinator's copy of the job.
        """
        # A trainable variable that the plan has among the state is one without gradient.
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
        """The training step as a function of the variables' values, in the order of the plan; one
        that ``counts`` has the job's metrics with each gradient."""
        variables = self.variables(plan)
        trainable = [variable.role == "trainable" for variable in plan.variables]
        if isinstance(self.model, keras.Model):
            seeds = seed_variables(self.model)
            loss = build_loss(self.job, self.model)
            metrics = TrainingMetrics(self.job, self.model) if counts else None
            scale = loss_scale(self.job.optimizer, self.model)
            return KerasStep(self.model, loss, variables, trainable, seeds, metrics, scale)
        return ModuleStep(self.model, self._module_loss(), variables, trainable)

    def make_finder(self, plan: Plan, *, training: bool = True) -> IdFinder | None:
        """What finds the ids of a batch for the plan's tables; None where it has none."""
        if not plan.tables:
            return None
        step = self.make_step(plan)
        return IdFinder(step, plan.variables, plan.tables, plan.shards, training=training)

    def num_seeds(self) -> int:
        """How many seed generators the model has."""
        return len(seed_variables(self.model))

    def values(self, plan: Plan) -> dict[str, Array]:
        """A copy of the model's present values: arena name -> ``[length]``, aligned."""
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
        """Gives the model's variables, ``but`` these, the values of their names.

        Raises:
            InvalidArgument: one is missing or has another shape; nothing was changed.
        """
        named = model_variables(self.model, but=but)
        for spec, _ in named:
            value = values.get(spec.name)
            if value is None:
                raise InvalidArgument(
                    f"there is no value for variable {spec.name!r}; it holds "
                    f"{listed(sorted(values))}"
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

    def _module_loss(self) -> Callable[..., Any]:
        assert callable(self.job.loss)  # build_model has refused others
        return self.job.loss


def _difference(mine: Sequence[VariableSpec], plan: Plan) -> str:
    """The first thing in which the model and the plan differ."""
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


def listed(names: Sequence[str], most: int = 6) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
