"""Makes layers and models anew whose classes have no ``get_config``, from their constructors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import keras
from keras.src.models.functional import Functional, functional_like_constructor

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
    if not issubclass(kind, keras.Layer):
        return False
    method = getattr(kind, "get_config")  # noqa: B009 (Keras has no types)
    # Keras makes a class Functional as soon as an object of it is.
    if method is Functional.get_config:
        return not functional_like_constructor(kind)
    return method in _DEFAULTS


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
    missing: dict[str, str] = {}
    changed: list[tuple[Any, str]] = []

    def give(layer: Any, method: str, result: Callable[[], Any]) -> None:
        # Not assigned by name: Keras tracks attributes.
        vars(layer)[method] = result
        changed.append((layer, method))

    try:
        for layer in layers:
            kind = type(layer)
            if kind.build is keras.Layer.build:
                # Keras would take it for built and not build its parts; its first call does.
                give(layer, "get_build_config", lambda: None)
            known = getattr(layer, "_auto_config", None) and not isinstance(layer, keras.Model)
            if not has_no_config(kind) or known:
                continue
            config = {
                "name": layer.name,
                "trainable": layer.trainable,
                "dtype": keras.saving.serialize_keras_object(layer.dtype_policy),
            }
            for name in _parameters(kind):
                place = next((each for each in (name, f"_{name}") if each in vars(layer)), None)
                if place is not None:
                    config[name] = _writable(getattr(layer, place), held)
                elif name not in config:
                    missing[kind.__name__] = name
            lacks = kind.__name__ in missing
            give(layer, "get_config", _refusal(kind) if lacks else partial(_same, config))
        yield missing
    finally:
        for layer, method in changed:
            vars(layer).pop(method, None)


def _same(config: dict[str, Any]) -> dict[str, Any]:
    return dict(config)


def _refusal(kind: type) -> Callable[[], Any]:
    def refuse() -> Any:
        raise NotImplementedError(kind.__name__)

    return refuse


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
            policy = self._read(base["dtype"])
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
