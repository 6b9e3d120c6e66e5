"""Writes frozen states into checkpoint files."""
