"""The optimizer formulas of the numpy engine, on one block of an arena.

Each class does the same operations as the class of that name in ``keras.optimizers`` (Keras 3.15),
in the same order and dtype. It works element by element, so the result does not depend on how an
arena is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from pserver.updates.engine import NDArray
from psrpc.core.errors import InvalidJob

_COMMON = {
    "name",
    "learning_rate",
    "weight_decay",
    "clipvalue",
    "ema_momentum",
    "ema_overwrite_frequency",
}


class UpdateRule(Protocol):
    """The formula of one optimizer."""

    slots: Mapping[str, float]
    """Slot name -> initial value."""

    def factors(self, learning_rate: np.float32, iterations: int, dtype: str, /) -> Any:
        """Computes the factors that all elements of a step share. Called once per arena and step;
        the result is passed to :meth:`update`."""

    def update(
        self,
        parameters: NDArray,
        gradients: NDArray,
        slots: Sequence[NDArray],
        factors: Any,
        scratch: tuple[NDArray, NDArray],
    ) -> None:
        """Updates ``parameters`` and ``slots`` in place; all arrays are ``[block]``."""


class Sgd:
    """SGD: plain, with momentum, or with Nesterov momentum."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._momentum = config.get("momentum", 0.0)
        self._nesterov = config.get("nesterov", False)
        self.slots: Mapping[str, float] = {"momentums": 0.0} if self._momentum else {}

    def factors(self, learning_rate: np.float32, _iterations: int, dtype: str, /) -> Any:
        real = np.dtype(dtype).type
        return real(learning_rate), real(self._momentum)

    def update(
        self,
        parameters: NDArray,
        gradients: NDArray,
        slots: Sequence[NDArray],
        factors: Any,
        scratch: tuple[NDArray, NDArray],
    ) -> None:
        rate, momentum = factors
        step, ahead = scratch
        np.multiply(gradients, rate, out=step)
        if not slots:
            parameters -= step
            return
        (velocity,) = slots
        velocity *= momentum
        velocity -= step
        if self._nesterov:
            np.multiply(velocity, momentum, out=ahead)
            ahead -= step
            parameters += ahead
        else:
            parameters += velocity


class Adagrad:
    """Adagrad (Duchi et al. 2011); epsilon is under the root, as in Keras."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._epsilon = config.get("epsilon", 1e-7)
        self.slots: Mapping[str, float] = {
            "accumulators": config.get("initial_accumulator_value", 0.1)
        }

    def factors(self, learning_rate: np.float32, _iterations: int, dtype: str, /) -> Any:
        real = np.dtype(dtype).type
        return real(learning_rate), real(self._epsilon)

    def update(
        self,
        parameters: NDArray,
        gradients: NDArray,
        slots: Sequence[NDArray],
        factors: Any,
        scratch: tuple[NDArray, NDArray],
    ) -> None:
        rate, epsilon = factors
        step, root = scratch
        (accumulator,) = slots
        np.multiply(gradients, gradients, out=root)
        accumulator += root
        np.add(accumulator, epsilon, out=root)
        np.sqrt(root, out=root)
        np.multiply(gradients, rate, out=step)
        step /= root
        parameters -= step


class Adam:
    """Adam (Kingma and Ba 2014), in the more efficient form described just before section 2.1.
    ``amsgrad`` follows Reddi et al. 2018."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._beta_1 = config.get("beta_1", 0.9)
        self._beta_2 = config.get("beta_2", 0.999)
        self._epsilon = config.get("epsilon", 1e-7)
        self._amsgrad = config.get("amsgrad", False)
        names = ("momentums", "velocities", "velocity_hats")
        self.slots: Mapping[str, float] = dict.fromkeys(names[: 3 if self._amsgrad else 2], 0.0)

    def factors(self, learning_rate: np.float32, iterations: int, dtype: str, /) -> Any:
        real = np.dtype(dtype).type
        one, step = real(1), real(iterations + 1)
        power_1, power_2 = np.power(real(self._beta_1), step), np.power(real(self._beta_2), step)
        alpha = real(learning_rate) * np.sqrt(one - power_2) / (one - power_1)
        return alpha, real(1 - self._beta_1), real(1 - self._beta_2), real(self._epsilon)

    def update(
        self,
        parameters: NDArray,
        gradients: NDArray,
        slots: Sequence[NDArray],
        factors: Any,
        scratch: tuple[NDArray, NDArray],
    ) -> None:
        alpha, rest_1, rest_2, epsilon = factors
        step, root = scratch
        momentum, velocity = slots[:2]
        np.subtract(gradients, momentum, out=step)
        step *= rest_1
        momentum += step
        np.multiply(gradients, gradients, out=step)
        step -= velocity
        step *= rest_2
        velocity += step
        if self._amsgrad:
            np.maximum(slots[2], velocity, out=slots[2])
            velocity = slots[2]
        np.sqrt(velocity, out=root)
        root += epsilon
        np.multiply(momentum, alpha, out=step)
        step /= root
        parameters -= step


_RULES: dict[str, type[Sgd] | type[Adagrad] | type[Adam]] = {
    "SGD": Sgd,
    "Adagrad": Adagrad,
    "Adam": Adam,
    "AdamW": Adam,  # Adam with a default weight_decay, which is in the config
}

_OWN = {
    "SGD": {"momentum", "nesterov"},
    "Adagrad": {"initial_accumulator_value", "epsilon"},
    "Adam": {"beta_1", "beta_2", "epsilon", "amsgrad"},
    "AdamW": {"beta_1", "beta_2", "epsilon", "amsgrad"},
}


def make_rule(optimizer: Mapping[str, Any]) -> UpdateRule:
    """Makes the rule of a serialized optimizer.

    Raises:
        InvalidJob: this engine does not support the optimizer or an argument of it.
    """
    name, config = optimizer["class_name"], optimizer["config"]
    if name not in _RULES:
        raise InvalidJob(
            f"the numpy engine has no {name}; it has {', '.join(_RULES)}. Use engine keras"
        )
    for argument, value in config.items():
        if value and argument not in _COMMON | _OWN[name]:
            known = sorted({"learning_rate", "weight_decay", "clipvalue"} | _OWN[name])
            raise InvalidJob(
                f"the numpy engine does not do {name}({argument}={value!r}); "
                f"it takes {', '.join(known)}. Use engine keras"
            )
    return _RULES[name](config)
