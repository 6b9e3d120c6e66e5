"""Decides what a worker does next. Pure."""
