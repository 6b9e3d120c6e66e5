"""Finds the checkpoint to export, compares checkpoints, exports tables."""
