"""The optimizers, schedules and constraints that a shard builds, and the placement that they need.

A serialized optimizer is the plain JSON of ``keras.optimizers.serialize``: ``{"module",
"class_name", "config", "registered_name"}``. It may also have ``excluded_from_weight_decay``, a
list of variable names (see :func:`weight_decay_exclusions`), because the Keras config omits the
arguments of ``exclude_from_weight_decay``.

Coordinator, workers and shards use this module; it does not import Keras.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

from psrpc.core.errors import InvalidJob
from psrpc.core.plan import AVERAGES as AVERAGES
from psrpc.core.plan import Placement, VariableSpec

ELEMENTWISE = frozenset(
    {
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Ftrl",
        "Lion",
        "Nadam",
        "RMSprop",
        "SGD",
        "ScheduleFreeAdamW",
    }
)
"""Optimizers whose update of an element depends on that element alone."""

WHOLE = frozenset({"Adafactor", "Lamb", "Muon"})
"""Optimizers that need whole variables, for example for norms or for rows and columns."""

OPTIMIZERS = ELEMENTWISE | WHOLE

SCHEDULES = frozenset(
    {
        "CosineDecay",
        "CosineDecayRestarts",
        "ExponentialDecay",
        "InverseTimeDecay",
        "PiecewiseConstantDecay",
        "PolynomialDecay",
    }
)

CONSTRAINTS = frozenset({"MaxNorm", "MinMaxNorm", "NonNeg", "UnitNorm"})

INITIALIZERS = frozenset({"Constant", "Ones", "RandomNormal", "RandomUniform", "Zeros"})
"""Allowed initializers of table rows; each can compute a row from its id alone."""

EXCLUDED = "excluded_from_weight_decay"
"""Key of the list of variable names in a serialized optimizer. Load-bearing."""

_REFUSED = {
    "LossScaleOptimizer": "workers scale the loss of float16 models; pass its inner optimizer",
    "MultiOptimizer": "use one optimizer for all variables",
}


def check_optimizer(serialized: Mapping[str, Any]) -> None:
    """Checks that an optimizer is on the allow-list and has plain arguments.

    Raises:
        InvalidJob: names the class or argument, its value and what to write instead.
    """
    name = _check_class(serialized, "optimizer", "keras.optimizers", OPTIMIZERS)
    check_arguments(name, serialized["config"])
    excluded = serialized.get(EXCLUDED, [])
    if not isinstance(excluded, list) or not all(isinstance(v, str) for v in excluded):
        raise InvalidJob(f"optimizer {name}: {EXCLUDED} is {excluded!r}; expected variable names")


def check_arguments(name: str, config: Mapping[str, Any]) -> None:
    """Checks that the arguments of optimizer ``name`` are plain, or schedules of the allow-list.

    Raises:
        InvalidJob: names the argument, its value and what to write instead.
    """
    for key, value in config.items():
        if key == "learning_rate" and isinstance(value, Mapping):
            check_schedule(value)
        else:
            _check_plain(f"{name}({key}=...)", value)
    if config.get("loss_scale_factor") is not None:
        raise InvalidJob(
            f"optimizer {name} has loss_scale_factor={config['loss_scale_factor']}; workers "
            "scale the loss where a model computes in float16, and only there: leave it out"
        )


def check_schedule(serialized: Mapping[str, Any]) -> None:
    """Checks that a schedule from ``keras.optimizers.schedules.serialize`` is on the allow-list.

    Raises:
        InvalidJob: names the class or argument, its value and what is allowed.
    """
    module = "keras.optimizers.schedules"
    _check_arguments(serialized, "learning-rate schedule", module, SCHEDULES)


def check_initializer(serialized: Mapping[str, Any]) -> None:
    """Checks that an initializer from ``keras.initializers.serialize`` is on the allow-list.

    Raises:
        InvalidJob: names the class or argument, its value and what is allowed.
    """
    _check_arguments(serialized, "initializer", "keras.initializers", INITIALIZERS)


def check_constraint(serialized: Mapping[str, Any]) -> None:
    """Checks that a constraint from ``keras.constraints.serialize`` is on the allow-list.

    Raises:
        InvalidJob: names the class or argument, its value and what is allowed.
    """
    _check_arguments(serialized, "constraint", "keras.constraints", CONSTRAINTS)


def placement_for(optimizer: Mapping[str, Any], variables: Iterable[VariableSpec]) -> Placement:
    """Returns ``cut`` if the update of each element depends on that element alone, else ``whole``.

    Raises:
        InvalidJob: a trainable variable has a constraint that is not on the allow-list.
    """
    constrained = False
    for variable in variables:
        if variable.role == "trainable" and variable.constraint is not None:
            try:
                check_constraint(variable.constraint)
            except InvalidJob as error:
                raise InvalidJob(f"variable {variable.name!r}: {error}") from None
            constrained = True
    whole = (
        constrained
        or optimizer["class_name"] in WHOLE
        or bool(optimizer["config"].get("clipnorm"))
        or bool(optimizer.get(EXCLUDED))
    )
    return "whole" if whole else "cut"


def needs_single_shard(optimizer: Mapping[str, Any]) -> str | None:
    """Returns why this optimizer runs on one shard only; None if it runs on any number."""
    norm = optimizer["config"].get("global_clipnorm")
    if not norm:
        return None
    return (
        f"optimizer {optimizer['class_name']} has global_clipnorm={norm}, the norm over all "
        "variables, which several shards do not know; use one shard, clipnorm or clipvalue"
    )


def with_learning_rate(optimizer: Mapping[str, Any], value: float) -> dict[str, Any]:
    """Returns a copy of ``optimizer`` with the learning rate ``value``.

    A schedule keeps its shape and starts from ``value``: its ``initial_learning_rate`` becomes
    ``value`` (``end_learning_rate``, an absolute floor, stays). With a warm-up, ``warmup_target``
    becomes ``value`` instead, and ``initial_learning_rate`` keeps its ratio to that. The values of
    a ``PiecewiseConstantDecay`` are all scaled so that the first is ``value``.

    Raises:
        InvalidJob: ``value`` is not a finite number of at least 0, or a schedule starts at 0 and
            so cannot be scaled.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidJob(f"optimizer.learning_rate is {value!r}; expected a number")
    value = float(value)
    if not (math.isfinite(value) and value >= 0):
        raise InvalidJob(
            f"optimizer.learning_rate is {value}; expected a finite number of at least 0"
        )
    changed = copy.deepcopy(dict(optimizer))
    schedule = changed["config"].get("learning_rate")
    if not isinstance(schedule, dict):
        changed["config"]["learning_rate"] = value
        return changed
    config = schedule["config"]
    if schedule["class_name"] == "PiecewiseConstantDecay":
        ratio = _ratio(value, config["values"][0], "PiecewiseConstantDecay(values=[0, ...])")
        config["values"] = [value, *(v * ratio for v in config["values"][1:])]
    elif config.get("warmup_target") is not None:
        if config["initial_learning_rate"] != 0:
            config["initial_learning_rate"] *= _ratio(
                value, config["warmup_target"], f"{schedule['class_name']}(warmup_target=0)"
            )
        config["warmup_target"] = value
    else:
        config["initial_learning_rate"] = value
    return changed


def weight_decay_exclusions(optimizer: Any, variables: Iterable[tuple[str, Any]]) -> list[str]:
    """Returns the names of the ``variables`` that a Keras ``optimizer`` does not decay.

    The job's description stores a non-empty result under :data:`EXCLUDED`. Needs live Keras
    objects, since ``exclude_from_weight_decay`` identifies a variable by the object that the
    optimizer uses: the Keras variable in Muon, the ``tf.Variable`` inside it in all others.
    """
    if optimizer.weight_decay is None and type(optimizer).__name__ != "Muon":
        return []
    own = type(optimizer).__name__ == "Muon"
    uses = optimizer._use_weight_decay
    return [name for name, v in variables if not uses(v if own else v.value)]


def _ratio(new: float, old: float, what: str) -> float:
    if old == 0:
        raise InvalidJob(
            f"optimizer.learning_rate={new} cannot scale {what}, which starts at 0; "
            "change the schedule in the job file"
        )
    return new / old


def _check_arguments(
    serialized: Mapping[str, Any], what: str, module: str, allowed: frozenset[str]
) -> None:
    name = _check_class(serialized, what, module, allowed)
    for key, value in serialized["config"].items():
        _check_plain(f"{name}({key}=...)", value)


def _check_class(
    serialized: Mapping[str, Any], what: str, module: str, allowed: frozenset[str]
) -> str:
    """Checks that the class is an allowed one of Keras itself, and returns its name."""
    name = serialized.get("class_name")
    if not isinstance(name, str) or not isinstance(serialized.get("config"), Mapping):
        raise InvalidJob(f"{what} {dict(serialized)!r} is not one that Keras has serialized")
    if name in _REFUSED:
        raise InvalidJob(f"{what} {name} is not supported: {_REFUSED[name]}")
    source = serialized.get("module", module)
    registered = serialized.get("registered_name")
    # As the registered name, Keras writes None for its own classes and package>name for a user's.
    foreign = source != module or registered not in (None, name)
    if foreign or name not in allowed:
        origin = f" from {registered or source!r}" if foreign else ""
        raise InvalidJob(
            f"{what} {name}{origin} cannot be built by the shards; "
            f"use one of {module}: {', '.join(sorted(allowed))}"
        )
    return name


def _check_plain(what: str, value: Any) -> None:
    if value is None or isinstance(value, bool | str | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidJob(
                f"{what} is {value}; expected a finite number: where it stands for no limit, leave "
                "it out or say a large one, such as 1e30"
            )
        return
    if isinstance(value, list | tuple):
        for element in value:
            _check_plain(what, element)
        return
    raise InvalidJob(f"{what} is {value!r}; shards take numbers, strings and lists of them only")
