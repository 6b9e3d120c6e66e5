"""The variables of a model under the names that the whole cluster knows them by."""

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
    """Each variable that shards hold, with its description: the trainable ones, then the state,
    both in the order of the model.

    Keras variables go by their ``path``, those of a ``tf.Module`` by the path of attributes that
    leads to them. Of several with one path, as layers of a model that is loaded twice have, the
    second and those after it are numbered in the order of the model: ``dense/kernel#2``. The state
    of seed generators and of metrics is not among them.

    Args:
        model: a built ``keras.Model``, or a ``tf.Module`` that has its variables.
        without_gradient: names of trainable variables that the loss does not depend on. They are
            never updated, as Keras never updates them, and so count as state.
        but: variables that no shard holds.

    Integers and booleans are state, whatever the model says: nothing has a gradient for them.

    Raises:
        InvalidJob: a variable is of a dtype that shards do not hold.
    """
    left_out = {id(v) for v in but}
    if isinstance(model, keras.Model):
        # Of weights, not of variables: those include the state of metrics and seed generators.
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
    """``paths`` with a number after each that was there before. Load-bearing: checkpoints have
    these names."""
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
    """The states of a Keras model's seed generators (int64 ``[2]`` each), in model order. Shards
    do not hold them: a worker sets them before each step, see ``worker.step.keras_step``."""
    if not isinstance(model, keras.Model):
        return []
    weights = {id(v) for v in model.weights}
    return [v for v in model.variables if id(v) not in weights and v.name == _SEED_STATE]


def _module_variables(module: tf.Module) -> list[tuple[str, Any]]:
    """The variables of a module with the attributes that lead to each. A variable that is reached
    in two ways goes by the first, in alphabetical order of attributes, as TensorFlow walks."""
    # The walk behind Module.variables, meant for use in subclasses; it alone also gives the path.
    walked = module._flatten(predicate=lambda value: isinstance(value, tf.Variable), with_path=True)
    named: dict[int, tuple[str, Any]] = {}
    for path, variable in walked:
        named.setdefault(id(variable), ("/".join(map(str, path)), variable))
    return list(named.values())


def derive(model: keras.Model) -> None:
    """Has adapted layers compute from the values that their variables have now."""
    for layer in _normalizations(model):
        layer.finalize_state()


@contextmanager
def derived(model: keras.Model) -> Iterator[None]:
    """As :func:`derive`, for the length of a block: within a ``StatelessScope`` from the values
    that variables have there. Otherwise each worker would normalize by what its own ``adapt()``
    came to, whatever the shards, a checkpoint or ``init_from`` say."""
    layers = [(layer, layer.mean, layer.variance) for layer in _normalizations(model)]
    derive(model)
    try:
        yield
    finally:
        for layer, mean, variance in layers:
            layer.mean, layer.variance = mean, variance


def _normalizations(model: keras.Model) -> list[keras.layers.Normalization]:
    # Not those that were given mean and variance: these are part of the code, not of the state.
    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.Normalization) and layer.input_mean is None
    ]


def check_vocabularies(model: keras.Model) -> None:
    """Refuses layers without the vocabulary that they look words or numbers up in, of which
    TensorFlow says that a table is not initialized.

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
