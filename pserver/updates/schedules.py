"""The learning-rate schedules of Keras in numpy, for the numpy engine.

Each has the formula of its counterpart in ``keras.optimizers.schedules`` (Keras 3.15) and also
computes in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from psrpc.core.errors import InvalidJob

Schedule = Callable[[int], np.float32]
"""Maps the number of optimizer steps so far to the learning rate."""

_ONE = np.float32(1)
_PI = np.float32(math.pi)


def make_schedule(learning_rate: float | Mapping[str, Any]) -> Schedule:
    """Makes the schedule of a serialized ``learning_rate``: a number or a Keras schedule.

    Raises:
        InvalidJob: the schedule is unknown, or a rate is an integer. Keras would compute the whole
            schedule in integers then.
    """
    if not isinstance(learning_rate, Mapping):
        constant = np.float32(learning_rate)
        return lambda _: constant
    name, config = learning_rate["class_name"], learning_rate["config"]
    if name not in _SCHEDULES:
        raise InvalidJob(
            f"the numpy engine has no schedule {name}; it has {', '.join(sorted(_SCHEDULES))}"
        )
    for rate in config.get("values", [config.get("initial_learning_rate")]):
        if not isinstance(rate, float):
            raise InvalidJob(f"schedule {name} has the rate {rate!r}; write {rate}.0")
    return _SCHEDULES[name](config)


def _exponential(config: Mapping[str, Any]) -> Schedule:
    first, rate = np.float32(config["initial_learning_rate"]), np.float32(config["decay_rate"])

    def at(step: int) -> np.float32:
        return np.float32(first * np.power(rate, _progress(config, step)))

    return at


def _inverse_time(config: Mapping[str, Any]) -> Schedule:
    first, rate = np.float32(config["initial_learning_rate"]), np.float32(config["decay_rate"])

    def at(step: int) -> np.float32:
        return np.float32(first / (_ONE + rate * _progress(config, step)))

    return at


def _progress(config: Mapping[str, Any], step: int) -> np.float32:
    done = np.float32(step) / np.float32(config["decay_steps"])
    return np.floor(done) if config["staircase"] else done


def _piecewise_constant(config: Mapping[str, Any]) -> Schedule:
    # Keras casts the boundaries to the integer type of the step.
    boundaries = [int(b) for b in config["boundaries"]]
    values = [np.float32(v) for v in config["values"]]

    def at(step: int) -> np.float32:
        return values[sum(step > b for b in boundaries)]

    return at


def _polynomial(config: Mapping[str, Any]) -> Schedule:
    first, last = (
        np.float32(config["initial_learning_rate"]),
        np.float32(config["end_learning_rate"]),
    )
    steps, power = np.float32(config["decay_steps"]), np.float32(config["power"])

    def at(step: int) -> np.float32:
        now, end = np.float32(step), steps
        if config["cycle"]:
            end = steps * (np.ceil(now / steps) if step else _ONE)
        else:
            now = min(now, end)
        return np.float32((first - last) * np.power(_ONE - now / end, power) + last)

    return at


def _cosine(config: Mapping[str, Any]) -> Schedule:
    first, alpha = np.float32(config["initial_learning_rate"]), config["alpha"]
    steps, warmup = np.float32(config["decay_steps"]), np.float32(config["warmup_steps"])
    warm = config["warmup_target"] is not None
    top = np.float32(config["warmup_target"]) if warm else first
    if not warm:
        warmup = np.float32(0)

    def at(step: int) -> np.float32:
        now = min(np.float32(step), steps + warmup)
        if now < warmup:
            return np.float32((top - first) * (now / warmup) + first)
        wave = np.float32(0.5) * (_ONE + np.cos(_PI * ((now - warmup) / steps)))
        return np.float32(top * (np.float32(1 - alpha) * wave + np.float32(alpha)))

    return at


def _cosine_restarts(config: Mapping[str, Any]) -> Schedule:
    first, alpha = np.float32(config["initial_learning_rate"]), np.float32(config["alpha"])
    steps = np.float32(config["first_decay_steps"])
    stretch, shrink = np.float32(config["t_mul"]), np.float32(config["m_mul"])

    def at(step: int) -> np.float32:
        done = np.float32(step) / steps
        if stretch == 1:
            restart = np.floor(done)
            done = done - restart
        else:
            restart = np.floor(np.log(_ONE - done * (_ONE - stretch)) / np.log(stretch))
            length = np.power(stretch, restart)
            done = (done - (_ONE - length) / (_ONE - stretch)) / length
        wave = np.float32(0.5) * np.power(shrink, restart) * (_ONE + np.cos(_PI * done))
        return np.float32(first * ((_ONE - alpha) * wave + alpha))

    return at


_SCHEDULES: dict[str, Callable[[Mapping[str, Any]], Schedule]] = {
    "CosineDecay": _cosine,
    "CosineDecayRestarts": _cosine_restarts,
    "ExponentialDecay": _exponential,
    "InverseTimeDecay": _inverse_time,
    "PiecewiseConstantDecay": _piecewise_constant,
    "PolynomialDecay": _polynomial,
}
