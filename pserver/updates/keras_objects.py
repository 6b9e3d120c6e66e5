"""Builds the Keras objects that a document names, of the allow-list and no others.

Keras's own deserializers make objects of any class that is registered or can be imported. Nothing
in this source calls them; a test over the syntax trees sees to that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import keras

from pserver.updates.allowlist import (
    check_constraint,
    check_initializer,
    check_optimizer,
    check_schedule,
)
from psrpc.core.errors import InvalidJob

Kind = Literal["optimizer", "schedule", "constraint", "initializer"]

_KINDS: Mapping[Kind, tuple[Any, Callable[[Mapping[str, Any]], None]]] = {
    "optimizer": (keras.optimizers, check_optimizer),
    "schedule": (keras.optimizers.schedules, check_schedule),
    "constraint": (keras.constraints, check_constraint),
    "initializer": (keras.initializers, check_initializer),
}


def rebuild(kind: Kind, document: Mapping[str, Any]) -> Any:
    """The object of ``document``, which Keras's ``serialize`` of that kind wrote.

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
