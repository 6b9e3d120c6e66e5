"""Converts between protobuf messages and the values of :mod:`pserver.core`."""
