"""Criteo's click records: their format, and a generator of the same shape."""
