"""Optimizers: NumPy rules and the Keras engine."""
