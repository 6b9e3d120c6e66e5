"""Puts the pure parts together, on one event loop."""
