"""Diagnoses why a cluster does not work."""
