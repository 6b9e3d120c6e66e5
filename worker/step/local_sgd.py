"""The optimizer that a worker runs between two pushes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from pserver.updates.keras_objects import rebuild
from psrpc.core.errors import InvalidJob

_NOT_LOCAL = (
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "gradient_accumulation_steps",
    "use_ema",
    "weight_decay",
)


@dataclass(frozen=True)
class LocalSgd:
    """SGD as in ``keras.optimizers.SGD``, with learning rate η, momentum μ and velocity v::

        v ← μ v − η g;   w ← w + v,   or with Nesterov's momentum   w ← w + μ v − η g

    Attributes:
        learning_rate: maps the number of earlier local steps (int64 scalar) to the rate; called
            while TensorFlow traces.
    """

    learning_rate: Callable[[tf.Tensor], Any]
    momentum: float
    nesterov: bool

    @staticmethod
    def of(serialized: Mapping[str, Any]) -> LocalSgd:
        """Converts an optimizer from ``keras.optimizers.serialize``. Raises InvalidJob if it is not
        SGD, or does more than the equations above."""
        name, config = serialized["class_name"], serialized["config"]
        if name != "SGD":
            raise InvalidJob(
                f"local_steps needs SGD, with momentum or without, but optimizer is {name}: a "
                "worker has no other optimizer's state; use SGD, or local_steps=1"
            )
        for argument in _NOT_LOCAL:
            if config.get(argument):
                raise InvalidJob(
                    f"local_steps cannot be used with SGD({argument}={config[argument]!r}); "
                    "workers run plain SGD: leave it out, or use local_steps=1"
                )
        rate = config["learning_rate"]
        momentum = float(config.get("momentum") or 0.0)
        if isinstance(rate, Mapping):
            return LocalSgd(rebuild("schedule", rate), momentum, bool(config.get("nesterov")))
        return LocalSgd(lambda _step: float(rate), momentum, bool(config.get("nesterov")))

    def step(
        self, value: tf.Tensor, velocity: tf.Tensor | None, gradient: tf.Tensor, rate: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Returns the new value, and the new velocity if there is one. All tensors have one shape
        and dtype, except that ``rate`` is a scalar of that dtype."""
        change = -rate * gradient
        if velocity is None:
            return value + change, None
        velocity = self.momentum * velocity + change
        if self.nesterov:
            return value + self.momentum * velocity + change, velocity
        return value + velocity, velocity


def shard_optimizer() -> dict[str, Any]:
    """Returns the shards' optimizer for local steps: it subtracts what is pushed."""
    serialized: dict[str, Any] = keras.optimizers.serialize(keras.optimizers.SGD(1.0))
    return serialized
