"""Hands a compiled Keras model and the settings of a ``fit`` to the processes of a job."""
