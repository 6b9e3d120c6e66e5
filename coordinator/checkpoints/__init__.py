"""Takes, commits, keeps and removes checkpoints."""
