"""Embedding layers and the rows that a batch needs of their tables."""
