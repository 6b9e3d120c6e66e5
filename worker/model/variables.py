"""The variables of a model under their cluster-wide names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from psrpc.core.errors import InvalidJob
from psrpc.core.plan import DTYPES, INTEGERS, Role, VariableSpec

_SEED_STATE = "seed_generator_state"


def model_variables(
    model: Any, without_gradient: Collection[str] = (), but: Collection[Any] = ()
) -> list[tuple[VariableSpec, Any]]:
    """Returns each variable that shards hold, with its description: the trainable ones, then the
    state, both in model order. Integers and booleans have no gradient, so they are always state.

    Keras variables are named by their ``path``, those of a ``tf.Module`` by their path of
    attributes. If several have one path, as the layers of a model loaded twice, the second and
    later ones get a number in model order: ``dense/kernel#2``. The state of seed generators and of
    metrics is left out.

    Args:
        model: a built ``keras.Model``, or a ``tf.Module`` that has its variables.
        without_gradient: names of trainable variables that the loss does not depend on. They are
            never updated, as in Keras, and so count as state.
        but: variables that no shard holds.

    Raises:
        InvalidJob: shards do not support the dtype of a variable.
    """
    left_out = {id(v) for v in but}
    if isinstance(model, keras.Model):
        # Not model.variables, which include the state of metrics and seed generators.
        trainable = {id(v) for v in model.trainable_weights}
        weights = [v for v in model.weights if id(v) not in left_out]
        names = _distinct([v.path for v in weights])
        named = [(n, v, id(v) in trainable) for n, v in zip(names, weights, strict=True)]
    else:
        named = [
            (name, v, v.trainable) for name, v in _module_variables(model) if id(v) not in left_out
        ]
    found: dict[Role, list[tuple[VariableSpec, Any]]] = {"trainable": [], "state": []}
    for name, variable, updated in named:
        own = keras.backend.standardize_dtype(variable.dtype)
        dtype = INTEGERS if _is_whole(own) else own
        if dtype not in DTYPES:
            kind = "trainable variable" if updated else "state variable"
            raise InvalidJob(
                f"{kind} {name!r} has dtype {dtype}; shards hold float32, float64, integers and "
                "booleans: make it one of those, or keep it out of the model"
            )
        trained = updated and dtype != INTEGERS and name not in without_gradient
        role: Role = "trainable" if trained else "state"
        constraint = getattr(variable, "constraint", None) if role == "trainable" else None
        spec = VariableSpec(
            name,
            tuple(variable.shape),
            dtype,
            role,
            None if constraint is None else keras.constraints.serialize(constraint),
        )
        found[role].append((spec, variable))
    return found["trainable"] + found["state"]


def _distinct(paths: Sequence[str]) -> list[str]:
    """Returns ``paths`` with a number after each repeated one. Load-bearing: checkpoints have these
    names."""
    found: list[str] = []
    seen: set[str] = set()
    taken = set(paths)
    for path in paths:
        name, number = path, 2
        while path in seen and name in taken:
            name, number = f"{path}#{number}", number + 1
        seen.add(path)
        taken.add(name)
        found.append(name)
    return found


def _is_whole(dtype: str) -> bool:
    return dtype == "bool" or dtype.startswith(("int", "uint"))


def seed_variables(model: Any) -> list[Any]:
    """Returns the states of a Keras model's seed generators (int64 ``[2]`` each), in model order.
    Shards do not hold them: a worker sets them before each step, see ``worker.step.keras_step``."""
    if not isinstance(model, keras.Model):
        return []
    weights = {id(v) for v in model.weights}
    return [v for v in model.variables if id(v) not in weights and v.name == _SEED_STATE]


def _module_variables(module: tf.Module) -> list[tuple[str, Any]]:
    """Returns the variables of a module with their paths of attributes. A variable with two paths
    gets the first, in alphabetical order of attributes, as TensorFlow walks."""
    # The walk behind Module.variables, meant for subclasses; only it also gives the path.
    walked = module._flatten(predicate=lambda value: isinstance(value, tf.Variable), with_path=True)
    named: dict[int, tuple[str, Any]] = {}
    for path, variable in walked:
        named.setdefault(id(variable), ("/".join(map(str, path)), variable))
    return list(named.values())


def derive(model: keras.Model) -> None:
    """Updates adapted layers from the current values of their variables."""
    for layer in _normalizations(model):
        layer.finalize_state()


@contextmanager
def derived(model: keras.Model) -> Iterator[None]:
    """Does as :func:`derive` for the length of a block; within a ``StatelessScope``, from the
    values in that scope. Without this, each worker would normalize by the result of its own
    ``adapt()``, and ignore the values of the shards, a checkpoint or ``init_from``."""
    layers = [(layer, layer.mean, layer.variance) for layer in _normalizations(model)]
    derive(model)
    try:
        yield
    finally:
        for layer, mean, variance in layers:
            layer.mean, layer.variance = mean, variance


def _normalizations(model: keras.Model) -> list[keras.layers.Normalization]:
    # Without layers that got mean and variance as arguments: those are code, not state.
    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.Normalization) and layer.input_mean is None
    ]


def check_vocabularies(model: keras.Model) -> None:
    """Refuses lookup layers without a vocabulary; TensorFlow calls that an uninitialized table.

    Raises:
        InvalidJob: names the layer.
    """
    within = set()
    for layer in model._flatten_layers():
        lookup = layer
        if isinstance(layer, keras.layers.TextVectorization):
            lookup = layer._lookup_layer
            within.add(id(lookup))
        elif id(layer) in within or not isinstance(
            layer, keras.layers.StringLookup | keras.layers.IntegerLookup
        ):
            continue
        if int(lookup.lookup_table.size()) == 0:
            raise InvalidJob(
                f"layer {layer.name!r} ({type(layer).__name__}) has no vocabulary; give it "
                "vocabulary=[...], or call its adapt(...) in the model function, with the same "
                "data in each process"
            )
