"""Combines the pure parts into a running job, on one event loop."""
