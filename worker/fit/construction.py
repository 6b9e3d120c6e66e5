"""Makes layers and models anew whose classes have no ``get_config``, from their constructors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import keras
from keras.src.saving.serialization_lib import SerializableDict

HELD = "held_by_fit"
"""Key of a value that Keras cannot write, in the config that stands for it: its place in the list
of such values."""

_DEFAULTS = (keras.Layer.get_config, keras.Model.get_config)
_KERAS_OBJECTS = (
    keras.Layer,
    keras.Metric,
    keras.initializers.Initializer,
    keras.losses.Loss,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
    keras.DTypePolicy,
    FunctionType,
)


def has_no_config(kind: type) -> bool:
    """Whether a class of layers leaves ``get_config`` to Keras."""
    return issubclass(kind, keras.Layer) and kind.get_config in _DEFAULTS


@contextmanager
def with_arguments(layers: Sequence[Any], held: list[Any]) -> Iterator[dict[str, str]]:
    """Gives ``layers`` of such classes the arguments of their constructors as config within the
    block, found as attributes of the same names. Keras itself keeps plain ones alone, and of a
    model's class the defaults in place of what was given.

    Args:
        held: gets the values that Keras cannot write.

    Yields:
        By class, the argument that is no attribute. Keras refuses to write such a layer.
    """
    before: list[tuple[Any, Any]] = []
    missing: dict[str, str] = {}
    try:
        for layer in layers:
            kind = type(layer)
            known = getattr(layer, "_auto_config", None)
            if not has_no_config(kind) or (known and not isinstance(layer, keras.Model)):
                continue
            places = {name: _place(layer, name) for name in _parameters(kind)}
            missing.update({kind.__name__: name for name, at in places.items() if at is None})
            before.append((layer, known))
            config = None
            if all(places.values()):
                given = {n: _writable(getattr(layer, at), held) for n, at in places.items() if at}
                config = SerializableDict(**given)
            # Not assigned by name: Keras tracks attributes.
            vars(layer)["_auto_config"] = config
        yield missing
    finally:
        for layer, known in before:
            vars(layer)["_auto_config"] = known


class Maker:
    """Stands for a class of layers while Keras reads a model."""

    def __init__(
        self, kind: type, held: Sequence[Any], made: Callable[[Any], None] | None = None
    ) -> None:
        """``held`` are the values of :func:`with_arguments`; ``made`` gets each new object."""
        self._kind = kind
        self._held = held
        self._made = made

    def from_config(self, config: dict[str, Any]) -> Any:
        """Returns a new object; called by Keras. Keras gives each constructor ``name``,
        ``trainable`` and ``dtype``, which many of a user's own do not take."""
        if has_no_config(self._kind):
            layer = self._construct(config)
        else:
            layer = self._kind.from_config(config)  # type: ignore[attr-defined]
        if self._made is not None:
            self._made(layer)
        return layer

    def _construct(self, config: dict[str, Any]) -> Any:
        names = _parameters(self._kind)
        given = {name: value for name, value in config.items() if name in names}
        base = {"name": config.get("name"), "dtype": config.get("dtype")}
        base = {name: value for name, value in base.items() if value is not None}
        if _takes_any(self._kind):
            given = {**config, **given}
        layer = self._kind(**{name: self._read(value) for name, value in given.items()})
        if "name" in base and "name" not in given:
            layer.name = base["name"]
        if "dtype" in base and "dtype" not in given and not layer.built:
            policy = keras.dtype_policies.get(base["dtype"])
            if policy != layer.dtype_policy:
                layer.dtype_policy = policy
        return layer

    def _read(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            if set(value) == {HELD}:
                return self._held[value[HELD]]
            if "class_name" in value and "config" in value:
                return keras.saving.deserialize_keras_object(value, safe_mode=False)
            return {key: self._read(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._read(each) for each in value)
        return value


def _parameters(kind: type) -> list[str]:
    """Returns the names of a constructor's arguments, without ``self`` and ``**kwargs``; those of
    ``*args`` too, which no attribute has."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]  # type: ignore[misc]
    return [each.name for each in parameters if each.kind != each.VAR_KEYWORD]


def _place(layer: Any, name: str) -> str | None:
    """Returns the attribute that holds the argument ``name``."""
    return next((each for each in (name, f"_{name}") if each in vars(layer)), None)


def _takes_any(kind: type) -> bool:
    parameters = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
    return any(each.kind == each.VAR_KEYWORD for each in parameters)


def _writable(value: Any, held: list[Any]) -> Any:
    """Returns a value that Keras can write in place of an argument."""
    if value is None or isinstance(value, (bool, int, float, str, *_KERAS_OBJECTS)):
        return value
    if isinstance(value, list | tuple):
        return [_writable(each, held) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _writable(each, held) for key, each in value.items()}
    held.append(value)
    return {HELD: len(held) - 1}
