"""Runs the trials of a study where the user says: on this machine, or as tasks of an engine."""
