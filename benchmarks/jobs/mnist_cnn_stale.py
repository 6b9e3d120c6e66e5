"""``examples/mnist_cnn.py`` for gradients that are many updates old.

The moving averages of BatchNormalization travel as differences, which are stale as gradients are.
At the example's momentum of 0.9 they follow at a rate of 0.1. With a delay of τ updates that is
stable below ``2 sin(π / (4 τ + 2))`` alone: 0.18 for τ = 8, but 0.095 for τ = 16, where training
goes well and the evaluation, which uses the averages, does not. Here they follow at 0.01.
"""

from __future__ import annotations

from dataclasses import replace

import keras

from examples import mnist_cnn


def build_model() -> keras.Model:
    model = mnist_cnn.build_model()
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.99
    return model


job = replace(mnist_cnn.job, model=build_model, optimizer=keras.optimizers.SGD(0.03))
