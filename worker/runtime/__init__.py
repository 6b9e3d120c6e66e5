"""Devices, buffers, seeds and TensorFlow settings of the process."""
