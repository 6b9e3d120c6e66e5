"""Runs a study: its trials are runs of clusters, on this machine or in tasks of an engine."""
