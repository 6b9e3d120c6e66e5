"""Stores the data and objects of a caller of ``fit`` in files that local processes map."""
