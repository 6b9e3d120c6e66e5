"""When checkpoints are taken, where they lie, and which are kept."""
