"""The coordinator: one job, its members, its work and its checkpoints."""
