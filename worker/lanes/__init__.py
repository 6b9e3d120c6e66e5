"""Computes several micro-batches at once, one on each device of a worker."""
