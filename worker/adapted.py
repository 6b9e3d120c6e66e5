"""Layers that compute from tensors that they derived from their variables when those were set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import keras


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
