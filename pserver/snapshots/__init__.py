"""Writes a frozen state into the files of a checkpoint."""
