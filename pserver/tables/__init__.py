"""Embedding tables: rows by id, created when they are pushed."""
