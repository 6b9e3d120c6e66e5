"""Starts and supervises a whole cluster on one machine."""
