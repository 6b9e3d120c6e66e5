"""Embedding tables: rows by id, which the first push creates."""
