"""Layers that are adapted to data, or given what they would learn from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import keras

from psrpc.core.errors import InvalidJob


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
