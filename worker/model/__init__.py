"""Builds the model of a job and reads what it was compiled with."""
