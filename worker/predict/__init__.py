"""Divides ``evaluate`` and ``predict`` over processes, and joins their results."""
