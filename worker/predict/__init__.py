"""Divides ``evaluate`` and ``predict`` over processes, joins their results; predicts for Spark."""
