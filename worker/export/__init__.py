"""Turns a checkpoint into a Keras model or a SavedModel."""
