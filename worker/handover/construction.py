"""Rebuilds layers and models whose classes have no ``get_config``, from their attributes.

Keras writes the arguments of a constructor only if all are numbers and strings, and for a model it
writes the defaults in place of the arguments. So this module hands over all attributes that the
class of an object has set: layers in Keras's file, other values beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from inspect import Parameter, signature
from types import FunctionType, MethodType
from typing import Any

import keras
from keras.src.models.functional import Functional, functional_like_constructor

STATE = "state_of_fit"
"""Key of the attributes in the config of an object. The keys below mark values of attributes."""

HELD, METHOD, PAIRS, TUPLE, WEIGHT = (
    f"{name}_of_fit" for name in ("held", "method", "pairs", "tuple", "weight")
)

_DEFAULTS = (keras.Layer.get_config, keras.Model.get_config)
_KERAS_OBJECTS = (
    keras.Layer,
    keras.Metric,
    keras.initializers.Initializer,
    keras.losses.Loss,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
    keras.random.SeedGenerator,
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
def with_state(layers: Sequence[Any], held: list[Any]) -> Iterator[None]:
    """Gives the ``layers`` whose classes have no ``get_config`` a config for :class:`Maker`, within
    the block.

    Args:
        held: a list to which the values are added that Keras cannot write.
    """
    changed: list[tuple[Any, str]] = []

    def give(layer: Any, method: str, result: Callable[[], Any]) -> None:
        # Not assigned by name: Keras tracks attributes.
        vars(layer)[method] = result
        changed.append((layer, method))

    try:
        for layer in layers:
            kind = type(layer)
            constructed = getattr(layer, "_auto_config", None) and not _is_model(layer)
            if has_no_config(kind) and not constructed:
                give(layer, "get_config", partial(_config, layer, held))
                give(layer, "get_build_config", lambda: None)
            elif not _is_kerass(kind) and kind.build is keras.Layer.build:
                # Keras would mark the layer as built without building its parts. Without a build
                # config its first call builds them.
                give(layer, "get_build_config", lambda: None)
        yield
    finally:
        for layer, method in changed:
            vars(layer).pop(method, None)


class Maker:
    """Takes the place of a class of layers while Keras reads a model."""

    def __init__(
        self, kind: Any, held: Sequence[Any], made: Callable[[Any], None] | None = None
    ) -> None:
        """``held`` are the values of :func:`with_state`; ``made`` gets each new object."""
        self._kind = kind
        self._held = held
        self._made = made

    def from_config(self, config: dict[str, Any]) -> Any:
        """Returns a new object; called by Keras."""
        if STATE in config:
            layer = self._restore(config)
        elif has_no_config(self._kind):
            layer = self._construct(config)
        else:
            layer = self._kind.from_config(config)
        if self._made is not None:
            self._made(layer)
        return layer

    def _restore(self, config: dict[str, Any]) -> Any:
        state = config[STATE]
        layer = self._kind.__new__(self._kind)
        if state["graph"] is not None:
            graph = _read_object(state["graph"])
            inputs, outputs = graph._inputs_struct, graph._outputs_struct
            # A class that was stored by value is Functional already; Keras cannot make it so twice.
            base = Functional if issubclass(self._kind, Functional) else keras.Model
            base.__init__(layer, inputs=inputs, outputs=outputs, name=config["name"])
        else:
            base = keras.Model if issubclass(self._kind, keras.Model) else keras.Layer
            policy = _read_object(config["dtype"])
            base.__init__(layer, name=config["name"], dtype=policy)
        weights = [layer.add_weight(**self._read(spec, layer, ())) for spec in state["weights"]]
        for name, value in state["attributes"].items():
            setattr(layer, name, self._read(value, layer, weights))
        layer.built = state["built"]
        return layer

    def _construct(self, config: dict[str, Any]) -> Any:
        """Makes a layer from arguments. Keras passes ``name``, ``trainable`` and ``dtype`` to each
        constructor, but many users' constructors do not take them."""
        parameters = signature(self._kind.__init__).parameters.values()
        given = dict(config)
        if not any(each.kind == Parameter.VAR_KEYWORD for each in parameters):
            names = {each.name for each in parameters}
            given = {name: value for name, value in config.items() if name in names}
        layer = self._kind(**given)
        if "name" not in given and "name" in config:
            layer.name = config["name"]
        if "dtype" not in given and "dtype" in config and not layer.built:
            policy = _read_object(config["dtype"])
            if policy != layer.dtype_policy:
                layer.dtype_policy = policy
        return layer

    def _read(self, value: Any, layer: Any, weights: Sequence[Any]) -> Any:
        if isinstance(value, list):
            return [self._read(each, layer, weights) for each in value]
        if not isinstance(value, Mapping):
            return value
        if "class_name" in value and "config" in value:
            return _read_object(value)
        if HELD in value:
            return self._held[value[HELD]]
        if WEIGHT in value:
            return weights[value[WEIGHT]]
        if METHOD in value:
            return getattr(layer, value[METHOD])
        if TUPLE in value:
            return tuple(self._read(value[TUPLE], layer, weights))
        if PAIRS in value:
            return dict(self._read(value[PAIRS], layer, weights))
        return {key: self._read(each, layer, weights) for key, each in value.items()}


def _config(layer: Any, held: list[Any]) -> dict[str, Any]:
    """Returns the config of a layer with its attributes; Keras writes the layers in it."""
    graph = None
    if isinstance(layer, Functional):
        graph = keras.Model(layer._inputs_struct, layer._outputs_struct, name=layer.name)
    weights = [
        *((each, True) for each in layer._trainable_variables),
        *((each, False) for each in layer._non_trainable_variables),
    ]
    places = {id(each): place for place, (each, _) in enumerate(weights)}
    kerass = _kerass(graph is not None)
    own = {name: value for name, value in vars(layer).items() if name not in kerass}
    own |= {name: getattr(layer, name) for name in _SETTINGS}
    return {
        "name": layer.name,
        "dtype": keras.saving.serialize_keras_object(layer.dtype_policy),
        STATE: {
            "graph": graph,
            "built": layer.built,
            "weights": [
                {
                    "name": each.name,
                    "shape": list(each.shape),
                    "dtype": each.dtype,
                    "trainable": trainable,
                    "initializer": "zeros",
                    "regularizer": each.regularizer,
                    "constraint": each.constraint,
                }
                for each, trainable in weights
            ],
            "attributes": {
                name: _writable(value, layer, places, held) for name, value in own.items()
            },
        },
    }


def _writable(value: Any, layer: Any, places: Mapping[int, int], held: list[Any]) -> Any:
    """Returns a form of an attribute's value that Keras can write."""
    write = partial(_writable, layer=layer, places=places, held=held)
    if value is None or isinstance(value, (bool, int, float, str, *_KERAS_OBJECTS)):
        return value
    if id(value) in places:
        return {WEIGHT: places[id(value)]}
    if isinstance(value, MethodType) and value.__self__ is layer:
        return {METHOD: value.__name__}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {TUPLE: [write(each) for each in value]}
    if isinstance(value, list):
        return [write(each) for each in value]
    if isinstance(value, dict):
        return {PAIRS: [[write(key), write(each)] for key, each in value.items()]}
    held.append(value)
    return {HELD: len(held) - 1}


_SETTINGS = ("activity_regularizer", "autocast", "supports_masking")
"""Attributes of Keras's that a user's class may set."""

_SET_LATER = ("_build_shapes_dict", "_supports_jit", "history", "get_build_config", "get_config")
"""Attributes that a build, ``fit`` and :func:`with_state` set."""


@cache
def _kerass(of_graph: bool) -> frozenset[str]:
    """Returns the attributes that Keras itself sets in layers and models."""
    # With names, since Keras numbers objects without one, and others would get other numbers.
    layer, model = keras.layers.Identity(name="identity"), _Same(name="same")
    for each in (layer, model):
        each(keras.KerasTensor((None, 1)))
    made = [layer, model]
    if of_graph:
        inputs = keras.Input((1,), name="inputs")
        made.append(keras.Model(inputs, layer(inputs), name="graph"))
    for each in made[1:]:
        each.compile("sgd", "mse", metrics=["mse"])
    return frozenset({*(name for each in made for name in vars(each)), *_SET_LATER})


class _Same(keras.Model):  # type: ignore[misc]
    def call(self, inputs: Any) -> Any:
        return inputs


def _is_kerass(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "keras"


def _is_model(layer: Any) -> bool:
    return isinstance(layer, keras.Model)


def _read_object(serialized: Any) -> Any:
    return keras.saving.deserialize_keras_object(serialized, safe_mode=False)
